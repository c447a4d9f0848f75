"""Every parameter of a model from its config.json, family by family, without building the model.

Counts equal those of transformers' own classes on the meta device (tests/facts/test_families.py builds each).
"""

from collections.abc import Callable

from shardwise.facts import hybrid_families, older_families
from shardwise.facts.tensors import (
    LAYER,
    Config,
    TensorGroup,
    Tensors,
    experts,
    gated_mlp,
    head_dim,
    kv_heads,
    moe_layers,
)


def separate_attention(
    t: Tensors, c: Config, prefix: str, qkv_bias: bool, out_bias: bool, out: str = "o_proj"
) -> None:
    h, d, a, k = c["hidden_size"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    t.linear(f"{prefix}.q_proj", a * d, h, qkv_bias)
    t.linear(f"{prefix}.k_proj", k * d, h, qkv_bias)
    t.linear(f"{prefix}.v_proj", k * d, h, qkv_bias)
    t.linear(f"{prefix}.{out}", h, a * d, out_bias)


def _experts(t: Tensors, prefix: str, n: int, h: int, width: int, count: int) -> None:
    t.add(f"{prefix}.experts.gate_up_proj", "expert", n, 2 * width, h, count=count)
    t.add(f"{prefix}.experts.down_proj", "expert", n, h, width, count=count)


# Families whose q and k pass a norm over each head (one weight per head element).
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "apertus")
# Families where attention_bias also puts a bias on the output projection.
_NO_OUT_BIAS = ("qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe", "seed_oss", "stablelm")


def _llama_like(t: Tensors, c: Config) -> None:
    """Separate q, k, v, o; gated or plain MLP or experts; RMS norms. Most families since 2023."""
    family, h = c["model_type"], c["hidden_size"]
    layer_norm = family in ("starcoder2", "stablelm", "nemotron")
    bias = bool(
        c.get("attention_bias")
        or c.get("use_qkv_bias")
        or family == "qwen2"
        or (family == "qwen2_moe" and c.get("qkv_bias", True))
        or (family == "starcoder2" and c.get("use_bias"))
    )
    out_bias = (bias and family not in _NO_OUT_BIAS) or bool(c.get("attention_out_bias"))
    t.ends(c, "model.embed_tokens", "model.norm", layer_norm, affine=family != "olmo")
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        _latentseparate_attention(t, c)
    else:
        separate_attention(t, c, f"{LAYER}.self_attn", bias, out_bias)
    _qk_norms(t, c)
    if family == "gpt_oss":
        t.add(f"{LAYER}.self_attn.sinks", "bias", c["num_attention_heads"])
    _mlp(t, c)
    for name in _norm_names(c):
        t.norm(f"{LAYER}.{name}", h, bias=layer_norm)


def _norm_names(c: Config) -> tuple[str, ...]:
    match c["model_type"]:
        case "olmo":
            return ()
        case "cohere" | "cohere2":
            return ("input_layernorm",)
        case "olmo2" | "olmo3":
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        case "gemma2" | "gemma3_text":
            pre = ("input_layernorm", "post_attention_layernorm")
            return (*pre, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        case "glm4":
            pre = ("input_layernorm", "post_attention_layernorm")
            return (*pre, "post_self_attn_layernorm", "post_mlp_layernorm")
        case "apertus":
            return ("attention_layernorm", "feedforward_layernorm")
        case "stablelm" if c.get("use_parallel_residual"):
            return ("input_layernorm",)
    return ("input_layernorm", "post_attention_layernorm")


def _qk_norms(t: Tensors, c: Config) -> None:
    family, d, a, k = c["model_type"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    at = f"{LAYER}.self_attn"
    if family in _HEAD_NORMS or (family == "glm4_moe" and c.get("use_qk_norm")):
        t.norm(f"{at}.q_norm", d)
        t.norm(f"{at}.k_norm", d)
    elif family == "hunyuan_v1_dense":
        t.norm(f"{at}.query_layernorm", d)
        t.norm(f"{at}.key_layernorm", d)
    elif family in ("olmo2", "olmo3", "olmoe"):
        t.norm(f"{at}.q_norm", a * d)
        t.norm(f"{at}.k_norm", k * d)
    elif family == "cohere" and c.get("use_qk_norm"):
        t.norm(f"{at}.q_norm", a, d)
        t.norm(f"{at}.k_norm", k, d)
    elif family == "stablelm" and c.get("qk_layernorm"):
        t.norm(f"{at}.q_layernorm.norms.*", d, count=t.layers * a)
        t.norm(f"{at}.k_layernorm.norms.*", d, count=t.layers * k)


def _latentseparate_attention(t: Tensors, c: Config) -> None:
    """DeepSeek's multi-head latent attention: low-rank q and kv (arXiv 2405.04434, section 2.1)."""
    h, a, bias = c["hidden_size"], c["num_attention_heads"], bool(c.get("attention_bias"))
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    kv, at = c["kv_lora_rank"], f"{LAYER}.self_attn"
    if c.get("q_lora_rank"):
        t.linear(f"{at}.q_a_proj", c["q_lora_rank"], h, bias)
        t.norm(f"{at}.q_a_layernorm", c["q_lora_rank"])
        t.linear(f"{at}.q_b_proj", a * (nope + rope), c["q_lora_rank"])
    else:
        t.linear(f"{at}.q_proj", a * (nope + rope), h)
    t.linear(f"{at}.kv_a_proj_with_mqa", kv + rope, h, bias)
    t.norm(f"{at}.kv_a_layernorm", kv)
    t.linear(f"{at}.kv_b_proj", a * (nope + v), kv)
    t.linear(f"{at}.o_proj", h, a * v, bias)


def _mlp(t: Tensors, c: Config) -> None:
    family, h, width = c["model_type"], c["hidden_size"], c["intermediate_size"]
    sparse = len(moe_layers(c))
    dense = t.layers - sparse
    bias = bool(c.get("mlp_bias"))
    if sparse:
        _moe(t, c, sparse)
    if family in ("glm", "glm4"):
        t.linear(f"{LAYER}.mlp.gate_up_proj", 2 * width, h)
        t.linear(f"{LAYER}.mlp.down_proj", h, width)
    elif family == "starcoder2":
        t.linear(f"{LAYER}.mlp.c_fc", width, h, bool(c.get("use_bias")))
        t.linear(f"{LAYER}.mlp.c_proj", h, width, bool(c.get("use_bias")))
    elif family in ("nemotron", "arcee", "apertus"):
        t.linear(f"{LAYER}.mlp.up_proj", width, h, bias)
        t.linear(f"{LAYER}.mlp.down_proj", h, width, bias)
        if family == "apertus":  # the two learned slopes of xIELU
            t.add(f"{LAYER}.mlp.act_fn.alpha_p", "bias", 1)
            t.add(f"{LAYER}.mlp.act_fn.alpha_n", "bias", 1)
    elif family == "llama4_text":
        gated_mlp(t, f"{LAYER}.feed_forward", h, c.get("intermediate_size_mlp") or width, count=dense)
    else:
        gated_mlp(t, f"{LAYER}.mlp", h, width, bias, dense)


def _moe(t: Tensors, c: Config, n: int) -> None:
    """Router, routed experts (fused, as transformers 5 holds them) and shared experts of `n` layers."""
    family, h, e = c["model_type"], c["hidden_size"], experts(c)
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    if family == "gpt_oss":
        at = f"{LAYER}.mlp"
        t.add(f"{at}.router.weight", "router", e, h, count=n)
        t.add(f"{at}.router.bias", "router", e, count=n)
        _experts(t, at, e, h, width, n)
        t.add(f"{at}.experts.gate_up_proj_bias", "expert", e, 2 * width, count=n)
        t.add(f"{at}.experts.down_proj_bias", "expert", e, h, count=n)
    elif family in ("granitemoe", "granitemoeshared"):
        t.add(f"{LAYER}.block_sparse_moe.router.weight", "router", e, h, count=n)
        _experts(t, f"{LAYER}.block_sparse_moe", e, h, width, n)
        if shared := c.get("shared_intermediate_size"):
            t.linear(f"{LAYER}.shared_mlp.input_linear", 2 * shared, h, count=n)
            t.linear(f"{LAYER}.shared_mlp.output_linear", h, shared, count=n)
    elif family == "llama4_text":
        at = f"{LAYER}.feed_forward"
        t.linear(f"{at}.router", e, h, count=n)  # a subclass of nn.Linear
        _experts(t, at, e, h, width, n)
        gated_mlp(t, f"{at}.shared_expert", h, width, count=n)
    else:
        at = f"{LAYER}.mlp"
        t.add(f"{at}.gate.weight", "router", e, h, count=n)
        _experts(t, at, e, h, width, n)
        if family == "qwen2_moe":
            gated_mlp(t, f"{at}.shared_expert", h, c["shared_expert_intermediate_size"], count=n)
            t.linear(f"{at}.shared_expert_gate", 1, h, count=n)
        elif shared := c.get("n_shared_experts"):
            gated_mlp(t, f"{at}.shared_experts", h, shared * width, count=n)


def _phi3(t: Tensors, c: Config) -> None:
    h, width = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    t.ends(c, "model.embed_tokens", "model.norm")
    t.linear(f"{LAYER}.self_attn.qkv_proj", q + 2 * kv, h)
    t.linear(f"{LAYER}.self_attn.o_proj", h, q)
    t.linear(f"{LAYER}.mlp.gate_up_proj", 2 * width, h)
    t.linear(f"{LAYER}.mlp.down_proj", h, width)
    t.norm(f"{LAYER}.input_layernorm", h)
    t.norm(f"{LAYER}.post_attention_layernorm", h)


def _phi(t: Tensors, c: Config) -> None:
    h, width, d = c["hidden_size"], c["intermediate_size"], head_dim(c)
    t.ends(c, "model.embed_tokens", "model.final_layernorm", True)
    t.add("lm_head.bias", "bias", c["vocab_size"])
    separate_attention(t, c, f"{LAYER}.self_attn", True, True, "dense")
    if c.get("qk_layernorm"):
        t.norm(f"{LAYER}.self_attn.q_layernorm", d, bias=True)
        t.norm(f"{LAYER}.self_attn.k_layernorm", d, bias=True)
    t.linear(f"{LAYER}.mlp.fc1", width, h, True)
    t.linear(f"{LAYER}.mlp.fc2", h, width, True)
    t.norm(f"{LAYER}.input_layernorm", h, bias=True)


def siglip_tower(t: Tensors, v: Config, text_hidden: int) -> None:
    """Gemma 3's vision side: a SigLIP tower and a projector into the text model's hidden size."""
    h, width, at = v["hidden_size"], v["intermediate_size"], "model.vision_tower.encoder.layers.*"
    t.layers, t.part = v["num_hidden_layers"], "vision"
    patches = (v["image_size"] // v["patch_size"]) ** 2
    patch = "model.vision_tower.embeddings.patch_embedding"
    t.add(f"{patch}.weight", "embedding", h, v["num_channels"] * v["patch_size"] ** 2)
    t.add(f"{patch}.bias", "bias", h)
    t.add("model.vision_tower.embeddings.position_embedding.weight", "embedding", patches, h)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        t.linear(f"{at}.self_attn.{name}", h, h, True)
    t.linear(f"{at}.mlp.fc1", width, h, True)
    t.linear(f"{at}.mlp.fc2", h, width, True)
    t.norm(f"{at}.layer_norm1", h, bias=True)
    t.norm(f"{at}.layer_norm2", h, bias=True)
    t.norm("model.vision_tower.post_layernorm", h, bias=True)
    if v.get("vision_use_head", True):
        head = "model.vision_tower.head"
        t.add(f"{head}.probe", "embedding", 1, 1, h)
        t.add(f"{head}.attention.in_proj_weight", "norm", 3 * h, h)
        t.add(f"{head}.attention.in_proj_bias", "bias", 3 * h)
        t.linear(f"{head}.attention.out_proj", h, h, True)
        t.norm(f"{head}.layernorm", h, bias=True)
        t.linear(f"{head}.mlp.fc1", width, h, True)
        t.linear(f"{head}.mlp.fc2", h, width, True)
    t.add("model.multi_modal_projector.mm_input_projection_weight", "norm", h, text_hidden)
    t.norm("model.multi_modal_projector.mm_soft_emb_norm", h)


_LLAMA_LIKE = (
    *("llama", "llama4_text", "mistral", "ministral", "mixtral", "smollm3", "arcee", "apertus"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gpt_oss"),
    *(
        "deepseek_v2",
        "deepseek_v3",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "seed_oss",
        "hunyuan_v1_dense",
    ),
    *("olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "granitemoeshared"),
    *("cohere", "cohere2", "starcoder2", "stablelm", "nemotron"),
)
FAMILIES: dict[str, Callable[[Tensors, Config], None]] = dict.fromkeys(_LLAMA_LIKE, _llama_like) | {
    "qwen3_next": hybrid_families.qwen3_next,
    "lfm2": hybrid_families.lfm2,
    "lfm2_moe": hybrid_families.lfm2,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": older_families.gpt2,
    "gpt_bigcode": older_families.gpt2,
    "gpt_neox": older_families.gpt_neox,
    "opt": older_families.opt,
    "falcon": older_families.falcon,
    "bloom": older_families.bloom,
    "mpt": older_families.mpt,
    "qwen": older_families.fused_qkv,
    "baichuan": older_families.fused_qkv,
    "chatglm": older_families.fused_qkv,
}
PLAIN_MLP = frozenset(
    {"phi", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "falcon", "bloom", "mpt", "starcoder2"}
    | {"nemotron", "arcee", "apertus"}
)


def tensor_groups(c: Config, vision: Config | None = None) -> tuple[TensorGroup, ...]:
    """All parameters of a model with config `c` (defaults filled in); `vision`: a SigLIP tower's config."""
    t = Tensors(c["num_hidden_layers"])
    FAMILIES[c["model_type"]](t, c)
    if vision is not None:
        siglip_tower(t, vision, c["hidden_size"])
    return tuple(t.groups)
