"""Families in which most layers have no attention: gated delta rule (Qwen3-Next) or short convolutions (LFM2)."""

from shardwise.facts.tensors import LAYER, Config, Tensors, attention_layers, gated_mlp, head_dim, kv_heads


def qwen3_next(t: Tensors, c: Config) -> None:
    """Every fourth layer gated attention, the others gated DeltaNet; all with routed and shared experts."""
    h, d, a, k = c["hidden_size"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    full = attention_layers(c)
    rest = t.layers - full
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key_width, value_width = keys * c["linear_key_head_dim"], values * c["linear_value_head_dim"]
    mixed, at = 2 * key_width + value_width, f"{LAYER}.linear_attn"
    t.ends(c, "model.embed_tokens", "model.norm")
    t.linear(f"{at}.in_proj_qkvz", mixed + value_width, h, count=rest)
    t.linear(f"{at}.in_proj_ba", 2 * values, h, count=rest)
    t.linear(f"{at}.out_proj", h, value_width, count=rest)
    t.add(f"{at}.conv1d.weight", "norm", mixed, 1, c["linear_conv_kernel_dim"], count=rest)
    t.norm(f"{at}.norm", c["linear_value_head_dim"], count=rest)
    t.add(f"{at}.dt_bias", "bias", values, count=rest)
    t.add(f"{at}.A_log", "bias", values, count=rest)
    at = f"{LAYER}.self_attn"
    t.linear(f"{at}.q_proj", 2 * a * d, h, count=full)  # queries and their gate
    t.linear(f"{at}.k_proj", k * d, h, count=full)
    t.linear(f"{at}.v_proj", k * d, h, count=full)
    t.linear(f"{at}.o_proj", h, a * d, count=full)
    t.norm(f"{at}.q_norm", d, count=full)
    t.norm(f"{at}.k_norm", d, count=full)
    at, n, width = f"{LAYER}.mlp", c["num_experts"], c["moe_intermediate_size"]
    t.add(f"{at}.gate.weight", "router", n, h)
    t.add(f"{at}.experts.gate_up_proj", "expert", n, 2 * width, h)
    t.add(f"{at}.experts.down_proj", "expert", n, h, width)
    gated_mlp(t, f"{at}.shared_expert", h, c["shared_expert_intermediate_size"])
    t.linear(f"{at}.shared_expert_gate", 1, h)
    t.norm(f"{LAYER}.input_layernorm", h)
    t.norm(f"{LAYER}.post_attention_layernorm", h)


def lfm2_width(c: Config) -> int:
    """LFM2's MLP width: two thirds of the config's, rounded up to a multiple, unless told to take it as it is."""
    width = int(c["intermediate_size"])
    if not c.get("block_auto_adjust_ff_dim"):
        return width
    width = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = int(c.get("block_multiple_of", 256))
    return -(-width // multiple) * multiple


def lfm2(t: Tensors, c: Config) -> None:
    """Short convolutions, some layers attention; LFM2-MoE has experts after its first dense layers."""
    h, d, a, k = c["hidden_size"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    full = attention_layers(c)
    rest, at = t.layers - full, f"{LAYER}.conv"
    t.ends(c, "model.embed_tokens", "model.embedding_norm")
    t.add(f"{at}.conv.weight", "norm", h, 1, c["conv_L_cache"], count=rest)
    t.linear(f"{at}.in_proj", 3 * h, h, bool(c.get("conv_bias")), rest)
    t.linear(f"{at}.out_proj", h, h, bool(c.get("conv_bias")), rest)
    at = f"{LAYER}.self_attn"
    t.linear(f"{at}.q_proj", a * d, h, count=full)
    t.linear(f"{at}.k_proj", k * d, h, count=full)
    t.linear(f"{at}.v_proj", k * d, h, count=full)
    t.linear(f"{at}.out_proj", h, a * d, count=full)
    t.norm(f"{at}.q_layernorm", d, count=full)
    t.norm(f"{at}.k_layernorm", d, count=full)
    at, dense = f"{LAYER}.feed_forward", t.layers
    if c["model_type"] == "lfm2_moe":
        dense = min(t.layers, c["num_dense_layers"])
        n, width, sparse = c["num_experts"], c["moe_intermediate_size"], t.layers - dense
        t.add(f"{at}.gate.weight", "router", n, h, count=sparse)
        t.add(f"{at}.experts.gate_up_proj", "expert", n, 2 * width, h, count=sparse)
        t.add(f"{at}.experts.down_proj", "expert", n, h, width, count=sparse)
    width = lfm2_width(c) if c["model_type"] == "lfm2" else c["intermediate_size"]
    t.linear(f"{at}.w1", width, h, count=dense)
    t.linear(f"{at}.w3", width, h, count=dense)
    t.linear(f"{at}.w2", h, width, count=dense)
    t.norm(f"{LAYER}.operator_norm", h)
    t.norm(f"{LAYER}.ffn_norm", h)
