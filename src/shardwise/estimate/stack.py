"""The part of a resolved recipe that decides memory and speed, flat and cheap to make by the thousand."""

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Place = Literal["none", "cpu", "nvme"]
Checkpointing = Literal["none", "selective", "full"] | int  # a number: so many layers, the first ones


@dataclass(frozen=True, slots=True)
class Stack:
    """How a model is trained. Every field is decided; nothing is `auto`.

    `micro_batch_size` counts sequences of `sequence_length` tokens on one rank. Packed rows are one sequence.
    """

    method: Literal["full", "lora", "qlora"] = "lora"
    sharding: Sharding = "single"
    world_size: int = 1
    gpus_per_node: int = 1
    dp_replicate: int = 1  # FSDP2: replicas of the sharded group
    reshard_after_forward: bool = True  # FSDP2
    offload_optimizer: Place = "none"
    offload_parameters: Place = "none"  # FSDP2 cpu_offload is "cpu" for both
    micro_batch_size: int = 1
    sequence_length: int = 2048
    labelled_tokens: int | None = None  # of the micro-batch with most; None: every token has a label
    documents: int | None = None  # in the fullest micro-batch; None: not known, more than one
    labelled_share: float = 1.0  # of all tokens, those with a label
    document_tokens: float | None = (
        None  # of the document a token lies in, on average; None: the whole sequence
    )
    gradient_accumulation_steps: int = 1
    precision: Literal["bf16", "fp32"] = "bf16"  # of compute
    master_weights: bool = True  # fp32 copies of trained bf16 weights
    optimizer: str = "adamw"
    clip_gradients: bool = True
    activation_checkpointing: Checkpointing = "none"
    loss: Literal["chunked", "full"] = "chunked"
    attention: str = "sdpa"
    compile: bool = False
    lora_rank: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    dora: bool = False
    double_quantization: bool = True
    reduce_bucket_size: int = 500_000_000  # DeepSpeed, elements
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    device: Literal["cuda", "cpu", "mps"] = "cuda"

    @property
    def recomputed(self) -> str:
        """What is computed again in the backward pass, in words: none, selective, full or '3 layers'."""
        kind = self.activation_checkpointing
        if isinstance(kind, str):
            return kind
        return f"{kind} layer{'s' if kind > 1 else ''}"

    @property
    def dp_shard(self) -> int:
        """Ranks that a shard is split over."""
        return 1 if self.sharding in ("single", "ddp") else self.world_size // self.dp_replicate

    @property
    def attended_tokens(self) -> float:
        """Length within which a token attends: its document's, at most its sequence's."""
        return min(self.sequence_length, self.document_tokens or self.sequence_length)

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size
