"""Every parameter of a model from its config.json, family by family, without building the model.

Counts equal those of transformers' own classes on the meta device (tests/facts/test_families.py builds each).
Shapes of matrices are (out, in), also where GPT-2 stores them transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Config = dict[str, Any]
Kind = Literal["embedding", "head", "linear", "norm", "bias", "expert", "router"]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """`count` tensors of one shape and role.

    `name` is the parameter's name with `*` for the layer; `module` the last module name (`q_proj`).
    `linear` is exactly what is an nn.Linear (or Conv1D) outside the head: what adapters fit on and 4-bit
    loading quantises. Fused expert tensors (`expert`) and routers with code of their own (`router`) are
    neither. An `expert` tensor holds all experts of its layer: its first axis is the expert.
    """

    name: str
    module: str
    kind: Kind
    shape: tuple[int, ...]
    count: int
    per_layer: bool
    part: Literal["text", "vision"] = "text"

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def parameters(self) -> int:
        return prod(self.shape) * self.count


class _Tensors:
    """Collects groups; `layers` is the count that `*` stands for in the calls that follow."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.part: Literal["text", "vision"] = "text"
        self.groups: list[TensorGroup] = []

    def add(self, name: str, kind: Kind, *shape: int, count: int | None = None) -> None:
        per_layer = "*" in name
        n = count if count is not None else (self.layers if per_layer else 1)
        if n and prod(shape):
            parts = [p for p in name.split(".") if p not in ("weight", "bias")]
            self.groups.append(TensorGroup(name, parts[-1], kind, tuple(shape), n, per_layer, self.part))

    def linear(self, name: str, out: int, into: int, bias: bool = False, count: int | None = None) -> None:
        self.add(f"{name}.weight", "linear", out, into, count=count)
        if bias:
            self.add(f"{name}.bias", "bias", out, count=count)

    def norm(self, name: str, *shape: int, bias: bool = False, count: int | None = None) -> None:
        self.add(f"{name}.weight", "norm", *shape, count=count)
        if bias:
            self.add(f"{name}.bias", "bias", *shape, count=count)

    def ends(
        self, c: Config, embedding: str, norm: str, norm_bias: bool = False, affine: bool = True
    ) -> None:
        """Token embedding, final norm, and an output head unless it is tied."""
        self.add(f"{embedding}.weight", "embedding", c["vocab_size"], c["hidden_size"])
        if affine:
            self.norm(norm, c["hidden_size"], bias=norm_bias)
        if not c["tie_word_embeddings"]:
            self.add("lm_head.weight", "head", c["vocab_size"], c["hidden_size"])


def head_dim(c: Config) -> int:
    """The config's own head_dim (not hidden_size / heads in Qwen3 and Gemma), else that quotient."""
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def kv_heads(c: Config) -> int:
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def moe_layers(c: Config) -> tuple[int, ...]:
    """Indices of layers whose MLP is a mixture of experts; empty for dense models."""
    family, layers = c["model_type"], c["num_hidden_layers"]
    if family in ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "gpt_oss"):
        return tuple(range(layers))
    if family in ("qwen2_moe", "qwen3_moe"):
        step, dense = c["decoder_sparse_step"], c.get("mlp_only_layers") or ()
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0 and experts(c))
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        return tuple(range(c["first_k_dense_replace"], layers))
    if family == "llama4_text":
        step = c.get("interleave_moe_layer_step") or 1
        return tuple(c.get("moe_layers") or range(step - 1, layers, step))
    return ()


def experts(c: Config) -> int:
    return int(c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts") or 0)


def _attention(
    t: _Tensors, c: Config, prefix: str, qkv_bias: bool, out_bias: bool, out: str = "o_proj"
) -> None:
    h, d, a, k = c["hidden_size"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    t.linear(f"{prefix}.q_proj", a * d, h, qkv_bias)
    t.linear(f"{prefix}.k_proj", k * d, h, qkv_bias)
    t.linear(f"{prefix}.v_proj", k * d, h, qkv_bias)
    t.linear(f"{prefix}.{out}", h, a * d, out_bias)


def _gated(
    t: _Tensors, prefix: str, h: int, width: int, bias: bool = False, count: int | None = None
) -> None:
    t.linear(f"{prefix}.gate_proj", width, h, bias, count)
    t.linear(f"{prefix}.up_proj", width, h, bias, count)
    t.linear(f"{prefix}.down_proj", h, width, bias, count)


def _experts(t: _Tensors, prefix: str, n: int, h: int, width: int, count: int) -> None:
    t.add(f"{prefix}.experts.gate_up_proj", "expert", n, 2 * width, h, count=count)
    t.add(f"{prefix}.experts.down_proj", "expert", n, h, width, count=count)


_L = "model.layers.*"
# Families whose q and k pass a norm over each head (one weight per head element).
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "apertus")
# Families where attention_bias also puts a bias on the output projection.
_NO_OUT_BIAS = ("qwen2", "qwen2_moe", "glm", "glm4", "glm4_moe", "seed_oss", "stablelm")


def _llama_like(t: _Tensors, c: Config) -> None:
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
    if family in ("deepseek_v2", "deepseek_v3"):
        _latent_attention(t, c)
    else:
        _attention(t, c, f"{_L}.self_attn", bias, out_bias)
    _qk_norms(t, c)
    if family == "gpt_oss":
        t.add(f"{_L}.self_attn.sinks", "bias", c["num_attention_heads"])
    _mlp(t, c)
    for name in _norm_names(c):
        t.norm(f"{_L}.{name}", h, bias=layer_norm)


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


def _qk_norms(t: _Tensors, c: Config) -> None:
    family, d, a, k = c["model_type"], head_dim(c), c["num_attention_heads"], kv_heads(c)
    at = f"{_L}.self_attn"
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


def _latent_attention(t: _Tensors, c: Config) -> None:
    """DeepSeek's multi-head latent attention: low-rank q and kv (arXiv 2405.04434, section 2.1)."""
    h, a, bias = c["hidden_size"], c["num_attention_heads"], bool(c.get("attention_bias"))
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    kv, at = c["kv_lora_rank"], f"{_L}.self_attn"
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


def _mlp(t: _Tensors, c: Config) -> None:
    family, h, width = c["model_type"], c["hidden_size"], c["intermediate_size"]
    sparse = len(moe_layers(c))
    dense = t.layers - sparse
    bias = bool(c.get("mlp_bias"))
    if sparse:
        _moe(t, c, sparse)
    if family in ("glm", "glm4"):
        t.linear(f"{_L}.mlp.gate_up_proj", 2 * width, h)
        t.linear(f"{_L}.mlp.down_proj", h, width)
    elif family == "starcoder2":
        t.linear(f"{_L}.mlp.c_fc", width, h, bool(c.get("use_bias")))
        t.linear(f"{_L}.mlp.c_proj", h, width, bool(c.get("use_bias")))
    elif family in ("nemotron", "arcee", "apertus"):
        t.linear(f"{_L}.mlp.up_proj", width, h, bias)
        t.linear(f"{_L}.mlp.down_proj", h, width, bias)
        if family == "apertus":  # the two learned slopes of xIELU
            t.add(f"{_L}.mlp.act_fn.alpha_p", "bias", 1)
            t.add(f"{_L}.mlp.act_fn.alpha_n", "bias", 1)
    elif family == "llama4_text":
        _gated(t, f"{_L}.feed_forward", h, c.get("intermediate_size_mlp") or width, count=dense)
    else:
        _gated(t, f"{_L}.mlp", h, width, bias, dense)


def _moe(t: _Tensors, c: Config, n: int) -> None:
    """Router, routed experts (fused, as transformers 5 holds them) and shared experts of `n` layers."""
    family, h, e = c["model_type"], c["hidden_size"], experts(c)
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    if family == "gpt_oss":
        at = f"{_L}.mlp"
        t.add(f"{at}.router.weight", "router", e, h, count=n)
        t.add(f"{at}.router.bias", "router", e, count=n)
        _experts(t, at, e, h, width, n)
        t.add(f"{at}.experts.gate_up_proj_bias", "expert", e, 2 * width, count=n)
        t.add(f"{at}.experts.down_proj_bias", "expert", e, h, count=n)
    elif family in ("granitemoe", "granitemoeshared"):
        t.add(f"{_L}.block_sparse_moe.router.weight", "router", e, h, count=n)
        _experts(t, f"{_L}.block_sparse_moe", e, h, width, n)
        if shared := c.get("shared_intermediate_size"):
            t.linear(f"{_L}.shared_mlp.input_linear", 2 * shared, h, count=n)
            t.linear(f"{_L}.shared_mlp.output_linear", h, shared, count=n)
    elif family == "llama4_text":
        at = f"{_L}.feed_forward"
        t.linear(f"{at}.router", e, h, count=n)  # a subclass of nn.Linear
        _experts(t, at, e, h, width, n)
        _gated(t, f"{at}.shared_expert", h, width, count=n)
    else:
        at = f"{_L}.mlp"
        t.add(f"{at}.gate.weight", "router", e, h, count=n)
        _experts(t, at, e, h, width, n)
        if family == "qwen2_moe":
            _gated(t, f"{at}.shared_expert", h, c["shared_expert_intermediate_size"], count=n)
            t.linear(f"{at}.shared_expert_gate", 1, h, count=n)
        elif shared := c.get("n_shared_experts"):
            _gated(t, f"{at}.shared_experts", h, shared * width, count=n)


def _phi3(t: _Tensors, c: Config) -> None:
    h, width = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    t.ends(c, "model.embed_tokens", "model.norm")
    t.linear(f"{_L}.self_attn.qkv_proj", q + 2 * kv, h)
    t.linear(f"{_L}.self_attn.o_proj", h, q)
    t.linear(f"{_L}.mlp.gate_up_proj", 2 * width, h)
    t.linear(f"{_L}.mlp.down_proj", h, width)
    t.norm(f"{_L}.input_layernorm", h)
    t.norm(f"{_L}.post_attention_layernorm", h)


def _phi(t: _Tensors, c: Config) -> None:
    h, width, d = c["hidden_size"], c["intermediate_size"], head_dim(c)
    t.ends(c, "model.embed_tokens", "model.final_layernorm", True)
    t.add("lm_head.bias", "bias", c["vocab_size"])
    _attention(t, c, f"{_L}.self_attn", True, True, "dense")
    if c.get("qk_layernorm"):
        t.norm(f"{_L}.self_attn.q_layernorm", d, bias=True)
        t.norm(f"{_L}.self_attn.k_layernorm", d, bias=True)
    t.linear(f"{_L}.mlp.fc1", width, h, True)
    t.linear(f"{_L}.mlp.fc2", h, width, True)
    t.norm(f"{_L}.input_layernorm", h, bias=True)


def _gpt2(t: _Tensors, c: Config) -> None:
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


def _gpt_neox(t: _Tensors, c: Config) -> None:
    h, width, at = c["hidden_size"], c["intermediate_size"], "gpt_neox.layers.*"
    t.ends(c, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", True)
    t.linear(f"{at}.attention.query_key_value", 3 * h, h, bool(c.get("attention_bias", True)))
    t.linear(f"{at}.attention.dense", h, h, bool(c.get("attention_bias", True)))
    t.linear(f"{at}.mlp.dense_h_to_4h", width, h, True)
    t.linear(f"{at}.mlp.dense_4h_to_h", h, width, True)
    t.norm(f"{at}.input_layernorm", h, bias=True)
    t.norm(f"{at}.post_attention_layernorm", h, bias=True)


def _opt(t: _Tensors, c: Config) -> None:
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


def _falcon(t: _Tensors, c: Config) -> None:
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


def _bloom(t: _Tensors, c: Config) -> None:
    h, at = c["hidden_size"], "transformer.h.*"
    t.ends(c, "transformer.word_embeddings", "transformer.ln_f", True)
    t.norm("transformer.word_embeddings_layernorm", h, bias=True)
    t.linear(f"{at}.self_attention.query_key_value", 3 * h, h, True)
    t.linear(f"{at}.self_attention.dense", h, h, True)
    t.linear(f"{at}.mlp.dense_h_to_4h", 4 * h, h, True)
    t.linear(f"{at}.mlp.dense_4h_to_h", h, 4 * h, True)
    t.norm(f"{at}.input_layernorm", h, bias=True)
    t.norm(f"{at}.post_attention_layernorm", h, bias=True)


def _mpt(t: _Tensors, c: Config) -> None:
    h, at = c["hidden_size"], "transformer.blocks.*"
    width = int(c["expansion_ratio"] * h)
    t.ends(c, "transformer.wte", "transformer.norm_f")
    t.linear(f"{at}.attn.Wqkv", 3 * h, h)
    t.linear(f"{at}.attn.out_proj", h, h)
    t.linear(f"{at}.ffn.up_proj", width, h)
    t.linear(f"{at}.ffn.down_proj", h, width)
    t.norm(f"{at}.norm_1", h)
    t.norm(f"{at}.norm_2", h)


def _fused_qkv(t: _Tensors, c: Config) -> None:
    """Models from before 2024 that ship code of their own: Qwen-1, Baichuan-2, ChatGLM-3. One fused qkv."""
    h, width, family = c["hidden_size"], c["intermediate_size"], c["model_type"]
    q, kv = c["num_attention_heads"] * head_dim(c), kv_heads(c) * head_dim(c)
    qkv, out = {"qwen": ("c_attn", "c_proj"), "baichuan": ("W_pack", "o_proj")}.get(
        family, ("query_key_value", "dense")
    )
    t.ends(c, "model.embed_tokens", "model.norm")
    t.linear(f"{_L}.attn.{qkv}", q + 2 * kv, h, family != "baichuan")
    t.linear(f"{_L}.attn.{out}", h, q)
    _gated(t, f"{_L}.mlp", h, width)
    t.norm(f"{_L}.input_layernorm", h)
    t.norm(f"{_L}.post_attention_layernorm", h)


def siglip_tower(t: _Tensors, v: Config, text_hidden: int) -> None:
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
    *("deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "seed_oss", "hunyuan_v1_dense"),
    *("olmo", "olmo2", "olmo3", "olmoe", "granite", "granitemoe", "granitemoeshared"),
    *("cohere", "cohere2", "starcoder2", "stablelm", "nemotron"),
)
FAMILIES: dict[str, Callable[[_Tensors, Config], None]] = dict.fromkeys(_LLAMA_LIKE, _llama_like) | {
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "falcon": _falcon,
    "bloom": _bloom,
    "mpt": _mpt,
    "qwen": _fused_qkv,
    "baichuan": _fused_qkv,
    "chatglm": _fused_qkv,
}
PLAIN_MLP = frozenset(
    {"phi", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "falcon", "bloom", "mpt", "starcoder2"}
    | {"nemotron", "arcee", "apertus"}
)


def tensor_groups(c: Config, vision: Config | None = None) -> tuple[TensorGroup, ...]:
    """All parameters of a model with config `c` (defaults filled in); `vision`: a SigLIP tower's config."""
    t = _Tensors(c["num_hidden_layers"])
    FAMILIES[c["model_type"]](t, c)
    if vision is not None:
        siglip_tower(t, vision, c["hidden_size"])
    return tuple(t.groups)
