"""The shape of a model: the numbers that memory, time and adapters depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import RecipeError, nearest
from shardwise.facts.tensors import TensorGroup

# Linear layers of a mixture's MLPs outside its experts (dense layers, shared experts). PEFT 0.21 takes these names
# for those of experts, which transformers 5 keeps in one tensor, and would put adapters on all experts instead.
READ_AS_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# What `lora.targets: attention` stands for, over all families.
ATTENTION_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "dense"),
    *("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that memory, time and adapters depend on. Counts are exact.

    `full_attention_layers` are those without a sliding window. `notes` says what a reader should know:
    where the shape came from, where files and config disagree, what was not counted.
    """

    source: str
    model_type: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    mlp: str  # gated | plain
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    moe_layers: tuple[int, ...]
    sliding_window: int | None
    full_attention_layers: int
    dtype: str  # of the stored weights: bf16, fp16, fp32, fp8
    has_chat_template: bool | None  # None: not known
    needs_own_code: bool  # auto_map in config.json
    tensors: tuple[TensorGroup, ...]
    total_parameters: int
    active_parameters: int
    notes: tuple[str, ...] = ()

    @property
    def is_moe(self) -> bool:
        return bool(self.moe_layers)

    def count(self, *kinds: str, part: str | None = None) -> int:
        """Parameters of these kinds (embedding, head, linear, norm, bias, expert, router)."""
        return sum(t.parameters for t in self.tensors if t.kind in kinds and part in (None, t.part))

    def __hash__(self) -> int:
        """Of what tells models apart: a search looks shapes up by the thousand."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.source, self.total_parameters, self.hidden_size, self.num_hidden_layers))

    @cached_property
    def _adapters(self) -> dict[tuple[int, str | tuple[str, ...], bool], int]:
        """Answers of `lora_parameters` so far."""
        return {}

    @cached_property
    def vision_parameters(self) -> int:
        return sum(t.parameters for t in self.tensors if t.part == "vision")

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer of the text model, the mean over layers."""
        per_layer = (t.parameters for t in self.tensors if t.per_layer and t.part == "text")
        return sum(per_layer) // self.num_hidden_layers

    @cached_property
    def quantised_parameters(self) -> int:
        """What 4-bit loading really quantises: linear layers outside the head.

        Embedding, head, norms and fused experts keep 16 bits.
        """
        return self.count("linear")

    def adapted(self, targets: str | Sequence[str]) -> tuple[TensorGroup, ...]:
        """The groups that get a LoRA adapter. Vision towers and the head are left alone, and a mixture's MLPs unless
        they are named.

        Raises RecipeError when `targets` names no layer of this model.
        """
        linear = tuple(t for t in self.tensors if t.kind == "linear" and t.part == "text")
        if targets == "all-linear":
            left = READ_AS_EXPERTS if self.is_moe else ()
            return tuple(t for t in linear if t.module not in left)
        wanted = ATTENTION_MODULES if targets == "attention" else _as_names(targets)
        hits = [[t for t in linear if _ends_with(t, name)] for name in wanted]
        missing = [name for name, found in zip(wanted, hits, strict=True) if not found]
        if (targets != "attention" and missing) or not any(hits):
            known = sorted({t.module for t in linear})
            close = nearest(missing[0], known)
            raise RecipeError(
                f"lora.targets: no linear layer is called {', '.join(map(repr, missing))}",
                f"this model's linear layers are: {', '.join(known)}",
                f"did you mean {close[0]}?" if close else "use lora.targets: all-linear",
            )
        return tuple(t for t in linear if any(_ends_with(t, name) for name in wanted))

    def lora_parameters(self, rank: int, targets: str | Sequence[str], dora: bool = False) -> int:
        """Trained parameters: rank x (in + out) for every adapted matrix, and `out` magnitudes with DoRA."""
        key = rank, targets if isinstance(targets, str) else tuple(targets), dora
        known = self._adapters.get(key)
        if known is None:
            known = self._adapters[key] = sum(
                (rank * (t.shape[0] + t.shape[1]) + (t.shape[0] if dora else 0)) * t.count
                for t in self.adapted(targets)
            )
        return known


def _as_names(targets: str | Sequence[str]) -> Sequence[str]:
    return (targets,) if isinstance(targets, str) else targets


def _ends_with(group: TensorGroup, name: str) -> bool:
    full = group.name.removesuffix(".weight")
    return full == name or full.endswith("." + name)
