"""Groups of a model's parameters, and how a family's file collects them.

Shapes of matrices are (out, in), also where GPT-2 stores them transposed.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Config = dict[str, Any]
LAYER = "model.layers.*"
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


class Tensors:
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
    if family == "lfm2_moe":
        return tuple(range(min(layers, c["num_dense_layers"]), layers))
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        step, dense = c["decoder_sparse_step"], c.get("mlp_only_layers") or ()
        return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0 and experts(c))
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        return tuple(range(c["first_k_dense_replace"], layers))
    if family == "llama4_text":
        step = c.get("interleave_moe_layer_step") or 1
        return tuple(c.get("moe_layers") or range(step - 1, layers, step))
    return ()


def attention_layers(c: Config) -> int:
    """Layers with attention over the whole sequence in a hybrid family; all of them where nothing says otherwise."""
    kinds = c.get("layer_types")
    if kinds:
        return sum(kind == "full_attention" for kind in kinds[: c["num_hidden_layers"]])
    if c.get("full_attn_idxs") is not None:
        return len(c["full_attn_idxs"])
    every = 4 if c["model_type"] == "qwen3_next" else 1
    return int(c["num_hidden_layers"]) // int(c.get("full_attention_interval") or every)


def experts(c: Config) -> int:
    return int(c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts") or 0)


def gated_mlp(
    t: Tensors, prefix: str, h: int, width: int, bias: bool = False, count: int | None = None
) -> None:
    t.linear(f"{prefix}.gate_proj", width, h, bias, count)
    t.linear(f"{prefix}.up_proj", width, h, bias, count)
    t.linear(f"{prefix}.down_proj", h, width, bias, count)
