"""What a layer's forward needs to know about a model: its matrices, norms and experts."""

from dataclasses import dataclass
from functools import lru_cache

from shardwise.facts.model import ModelShape

_ATTENTION_OUT = ("o_proj", "out_proj", "dense", "c_proj")
_MLP_OUT = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "output_linear")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear layer. `rank` 0: no adapter."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    rank: int = 0
    quantised: bool = False
    trained: bool = False

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(
    frozen=True, slots=True, eq=False
)  # made once per question and compared by identity: hashing is the cost
class Block:
    """One layer of the text model, as its forward sees it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_in: tuple[Matrix, ...]
    attention_out: Matrix
    mlp_in: tuple[Matrix, ...]
    mlp_out: Matrix | None
    gated: bool
    norms: int
    layer_norm: bool
    head_norms: bool
    norm_in_fp32: bool
    silu: bool
    rotary_cat: bool  # rotary embeddings put q and k together from parts, which leaves them ordered by head
    softcap: bool  # attention scores go through a tanh
    sinks: bool  # and have one column more, which no fused kernel of ours takes
    parallel: bool
    experts: int
    experts_per_token: int
    expert_width: int
    expert_parameters: int
    parameters: int
    trained: bool


@lru_cache(maxsize=512)
def block_of(shape: ModelShape, method: str, rank: int, targets: str | tuple[str, ...]) -> Block:
    """The layer that most layers of `shape` are like, with adapters where `targets` puts them."""
    adapted = {t.name for t in shape.adapted(targets)} if method != "full" else set()
    biases = {t.name.removesuffix(".bias") for t in shape.tensors if t.kind == "bias"}
    matrices: dict[str, list[Matrix]] = {"attention": [], "mlp": []}
    half = shape.num_hidden_layers / 2
    for t in shape.tensors:
        if t.kind != "linear" or not t.per_layer or t.part != "text" or t.count < half:
            continue
        stem = t.name.removesuffix(".weight")
        mixer = any(word in stem for word in ("attn", "attention", ".conv."))
        place = "attention" if mixer else "mlp"
        outputs, inputs = t.shape[0], t.shape[1]
        matrices[place].append(
            Matrix(
                t.module,
                inputs,
                outputs,
                stem in biases,
                rank if t.name in adapted else 0,
                method == "qlora",
                method == "full",
            )
        )
    attention, mlp = matrices["attention"], matrices["mlp"]
    block_norms = [t for t in shape.tensors if t.kind == "norm" and t.per_layer and t.part == "text"]
    hidden = [t for t in block_norms if t.shape == (shape.hidden_size,) and "attn.q" not in t.name]
    experts = [t for t in shape.tensors if t.kind == "expert" and t.count >= half]
    width = shape.moe_intermediate_size or shape.intermediate_size
    return Block(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        attention_in=tuple(m for m in attention if m.name not in _ATTENTION_OUT),
        attention_out=next(m for m in attention if m.name in _ATTENTION_OUT),
        mlp_in=tuple(m for m in mlp if m.name not in _MLP_OUT and m.outputs > 1),
        mlp_out=next((m for m in mlp if m.name in _MLP_OUT), None),
        gated=shape.mlp == "gated",
        norms=max(1, round(sum(t.count for t in hidden) / shape.num_hidden_layers)) if hidden else 2,
        layer_norm=any(t.kind == "bias" and ("norm" in t.name or ".ln_" in t.name) for t in shape.tensors),
        head_norms=any(t.kind == "norm" and t.shape == (shape.head_dim,) for t in block_norms),
        norm_in_fp32=shape.model_type.startswith("gemma"),
        silu=not shape.model_type.startswith(("gemma", "phi3", "glm")),
        rotary_cat=shape.model_type in ("phi3", "gpt_neox", "phi"),
        softcap=shape.model_type == "gemma2",
        sinks=shape.model_type == "gpt_oss",
        parallel=len(hidden) == 1 or shape.model_type in ("gpt_neox", "falcon", "phi"),
        experts=shape.num_experts if experts else 0,
        experts_per_token=shape.experts_per_token,
        expert_width=width,
        expert_parameters=sum(t.size for t in experts),
        parameters=shape.layer_parameters,
        trained=method == "full",
    )


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per element of what a forward handles."""

    compute: int  # matrix products
    residual: int  # the stream between layers
    weight: int  # resident weights, and their gradients
    adapter: int  # adapters as the forward sees them
    adapter_stored: int  # adapters as they are kept (differs under autocast)
