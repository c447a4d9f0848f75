"""Families with fused or biased layers and names of their own: GPT-2 to Baichuan."""

from shardwise.facts.tensors import LAYER, Config, Tensors, gated_mlp, head_dim, kv_heads


def gpt2(t: Tensors, c: Config) -> None:
    """GPT-2, and StarCoder-1's gpt_bigcode whose keys and values are one head."""
    h, width, at = c["hidden_size"], c.get("n_inner") or 4 * c["hidden_size"], "transformer.h.*"
    kv = h
    if c["model_type"] == "gpt_bigcode" and c.get("multi_query", True):
        kv = h // c["num_attention_heads"]
    t.ends(c, "transformer.wte", "transformer.ln_f", True)
    t.add("transformer.wpe.weight", "embedding", c["max_position_embeddings"], h)
    t.linear(f"{at}.attn.c_attn", h + 2 * kv, h, True)
    t.linear(f"{at}.attn.c_proj", h, h, True)
    t.linear(f"{at}.mlp.c_fc", width, h, True)
    t.linear(f"{at}.mlp.c_proj", h, width, True)
    t.norm(f"{at}.ln_1", h, bias=True)
    t.norm(f"{at}.ln_2", h, bias=True)


def gpt_neox(t: Tensors, c: Config) -> None:
    h, width, at = c["hidden_size"], c["intermediate_size"], "gpt_neox.layers.*"
    t.ends(c, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", True)
    t.linear(f"{at}.attention.query_key_value", 3 * h, h, bool(c.get("attention_bias", True)))
    t.linear(f"{at}.attention.dense", h, h, bool(c.get("attention_bias", True)))
    t.linear(f"{at}.mlp.dense_h_to_4h", width, h, True)
    t.linear(f"{at}.mlp.dense_4h_to_h", h, width, True)
    t.norm(f"{at}.input_layernorm", h, bias=True)
    t.norm(f"{at}.post_attention_layernorm", h, bias=True)


def opt(t: Tensors, c: Config) -> None:
    h, width, at = c["hidden_size"], c["ffn_dim"], "model.decoder.layers.*"
    word, bias = c.get("word_embed_proj_dim") or h, bool(c.get("enable_bias", True))
    affine = bool(c.get("layer_norm_elementwise_affine", True))
    t.add("model.decoder.embed_tokens.weight", "embedding", c["vocab_size"], word)
    t.add("model.decoder.embed_positions.weight", "embedding", c["max_position_embeddings"] + 2, h)
    if word != h:
        t.linear("model.decoder.project_in", h, word)
        t.linear("model.decoder.project_out", word, h)
    if c.get("do_layer_norm_before", True) and affine and not c.get("_remove_final_layer_norm"):
        t.norm("model.decoder.final_layer_norm", h, bias=True)
    if not c["tie_word_embeddings"]:
        t.add("lm_head.weight", "head", c["vocab_size"], word)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        t.linear(f"{at}.self_attn.{name}", h, h, bias)
    t.linear(f"{at}.fc1", width, h, bias)
    t.linear(f"{at}.fc2", h, width, bias)
    if affine:
        t.norm(f"{at}.self_attn_layer_norm", h, bias=True)
        t.norm(f"{at}.final_layer_norm", h, bias=True)


def falcon(t: Tensors, c: Config) -> None:
    h, a, at = c["hidden_size"], c["num_attention_heads"], "transformer.h.*"
    d, bias, new = h // a, bool(c.get("bias")), bool(c.get("new_decoder_architecture"))
    width = c.get("ffn_hidden_size") or 4 * h
    if new:
        fused = (2 * (c.get("num_kv_heads") or a) + a) * d
    else:
        fused = h + 2 * d if c.get("multi_query", True) else 3 * h
    t.ends(c, "transformer.word_embeddings", "transformer.ln_f", True)
    t.linear(f"{at}.self_attention.query_key_value", fused, h, bias)
    t.linear(f"{at}.self_attention.dense", h, h, bias)
    t.linear(f"{at}.mlp.dense_h_to_4h", width, h, bias)
    t.linear(f"{at}.mlp.dense_4h_to_h", h, width, bias)
    if new and (c.get("num_ln_in_parallel_attn") or 2) == 2:
        names: tuple[str, ...] = ("ln_attn", "ln_mlp")
    elif c.get("parallel_attn", True):
        names = ("input_layernorm",)
    else:
        names = ("input_layernorm", "post_attention_layernorm")
    for name in names:
        t.norm(f"{at}.{name}", h, bias=True)


def bloom(t: Tensors, c: Config) -> None:
    h, at = c["hidden_size"], "transformer.h.*"
    t.ends(c, "transformer.word_embeddings", "transformer.ln_f", True)
    t.norm("transformer.word_embeddings_layernorm", h, bias=True)
    t.linear(f"{at}.self_attention.query_key_value", 3 * h, h, True)
    t.linear(f"{at}.self_attention.dense", h, h, True)
    t.linear(f"{at}.mlp.dense_h_to_4h", 4 * h, h, True)
    t.linear(f"{at}.mlp.dense_4h_to_h", h, 4 * h, True)
    t.norm(f"{at}.input_layernorm", h, bias=True)
    t.norm(f"{at}.post_attention_layernorm", h, bias=True)


def mpt(t: Tensors, c: Config) -> None:
    h, at = c["hidden_size"], "transformer.blocks.*"
    width = int(c["expansion_ratio"] * h)
    t.ends(c, "transformer.wte", "transformer.norm_f")
    t.linear(f"{at}.attn.Wqkv", 3 * h, h)
    t.linear(f"{at}.attn.out_proj", h, h)
    t.linear(f"{at}.ffn.up_proj", width, h)
    t.linear(f"{at}.ffn.down_proj", h, width)
    t.norm(f"{at}.norm_1", h)
    t.norm(f"{at}.norm_2", h)


def fused_qkv(t: Tensors, c: Config) -> None:
    """Models from before 2024 that ship code of their own: Qwen-1, Baichuan-2, ChatGLM-3. One fused qkv."""
    h, width, family = c["hidden_size"], c["intermediate_size"], c["model_type"]
    q, kv = c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    qkv, out = {"qwen": ("c_attn", "c_proj"), "baichuan": ("W_pack", "o_proj")}.get(
        family, ("query_key_value", "dense")
    )
    t.ends(c, "model.embed_tokens", "model.norm")
    t.linear(f"{LAYER}.attn.{qkv}", q + 2 * kv, h, family != "baichuan")
    t.linear(f"{LAYER}.attn.{out}", h, q)
    gated_mlp(t, f"{LAYER}.mlp", h, width)
    t.norm(f"{LAYER}.input_layernorm", h)
    t.norm(f"{LAYER}.post_attention_layernorm", h)
