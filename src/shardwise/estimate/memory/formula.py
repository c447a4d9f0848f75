"""Peak memory of a training step by formula: for every model, without torch, in a millisecond.

What a rank holds between steps comes from `states`; what lives during a step is played on paper (`play`). Each
term states its formula with the numbers put in.
"""

from dataclasses import replace
from functools import lru_cache

from shardwise.estimate.memory.around import around
from shardwise.estimate.memory.fixed import fixed_bytes, reserved_bytes
from shardwise.estimate.memory.host import disk_bytes_per_node, host_bytes_per_node
from shardwise.estimate.memory.layer import Widths, block_of
from shardwise.estimate.memory.moments import moments, played, update
from shardwise.estimate.memory.paper import Sheet
from shardwise.estimate.memory.play import Question
from shardwise.estimate.memory.reserved import replayed_bytes
from shardwise.estimate.memory.states import Held, held
from shardwise.estimate.memory.terms import PHASES, TERMS, MemoryEstimate, MemoryTerm
from shardwise.estimate.memory.trainer import OURS, OURS_FULL_LOSS, Trainer
from shardwise.estimate.stack import Stack
from shardwise.facts.model import ModelShape
from shardwise.facts.shape import READ_AS_EXPERTS
from shardwise.units import format_bytes

# Families whose blocks are like those the paper step is compared with in the tests; others get a wider range.
PROVEN = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
        "granite",
        "phi3",
        "phi",
        "gpt_neox",
        "starcoder2",
        "gemma",
        "gemma2",
    )
)
NARROW, WIDE = 0.03, 0.15
_KEPT = {
    "none": "every layer's saved tensors",
    "full": "every layer's input and one layer's saved tensors",
    "selective": "every layer's input and attention output, and one layer's saved tensors",
}
# Shares of the peak from which a note suggests something smaller, and the usual bound of routers' load balancing
# (capacity factor 1.25 of Switch Transformers, arXiv 2101.03961, section 2.2).
LOGITS_SHARE, BUFFERS_SHARE, IMBALANCE = 0.2, 0.2, 1.25


def estimate_memory(shape: ModelShape, stack: Stack, trainer: Trainer | None = None) -> MemoryEstimate:
    """Memory of the fullest rank while `stack` trains `shape`; by our own step unless a `trainer` is given.

    Ignores: unequal shards (below 0.1 %), scratch memory inside kernels other than those stated.
    """
    trainer = trainer or ours(stack)
    states = held(shape, stack, trainer)
    question = question_of(shape, stack, trainer)
    sheet = played(question)
    found = moments(states, question, stack, shape)
    phases, peak_phase, states = found.phases, found.peak_phase, found.states
    allocated = phases[peak_phase]
    proven = shape.model_type in PROVEN and not shape.is_moe and trainer.name == OURS.name
    proven = proven and stack.sharding != "zero3"  # what its prefetcher gathers when is not played
    spread = NARROW if proven else WIDE
    return MemoryEstimate(
        allocated_bytes=allocated,
        peak_phase=peak_phase,
        phases={p: phases[p] for p in PHASES if p in phases},
        terms=_terms(found.sizes, states, shape, stack, trainer),
        reserved_bytes=reserved_bytes(allocated, stack),
        fixed_bytes=fixed_bytes(stack),
        host_bytes_per_node=host_bytes_per_node(shape, stack, states.host + states.paged),
        disk_bytes_per_node=disk_bytes_per_node(shape, stack, states.nvme),
        low_bytes=int(allocated * (1 - spread)),
        high_bytes=int(allocated * (1 + spread)),
        source="formula",
        notes=_notes(shape, stack, sheet, phases, question, states.paged),
        paged_bytes=states.paged,
    )


def _notes(
    shape: ModelShape, stack: Stack, sheet: Sheet, phases: dict[str, int], question: Question, paged: int
) -> tuple[str, ...]:
    """What a reader should know about this estimate, and what would make it smaller."""
    notes = []
    logits = max(sheet.at_peak.get(p, {}).get("loss", 0) for p in ("loss", "backward"))
    if question.trainer.loss == "full" and logits > LOGITS_SHARE * max(phases.values()):
        notes.append(
            f"logits of {shape.vocab_size:,} words take {format_bytes(logits)}: "
            "training.loss: chunked never holds them all"
        )
    mlps = [t.module for t in shape.tensors if t.kind == "linear" and t.module in READ_AS_EXPERTS]
    if stack.method != "full" and stack.lora_targets == "all-linear" and shape.is_moe and mlps:
        notes.append(
            "adapters are on linear layers outside the MLPs: PEFT takes the names of dense layers and shared experts "
            "for those of all experts"
        )
    if paged:
        notes.append(
            f"{format_bytes(paged)} of optimizer states are paged: on the device while there is room, else they come "
            "from host memory in every step and go back; torch counts them in neither case"
        )
    if shape.is_moe:
        notes.append(
            f"{shape.experts_per_token} of {shape.num_experts} experts per token, evenly filled; if one is filled "
            f"{IMBALANCE:g} times as much, its activations grow by as much"
        )
    if stack.sharding in ("zero1", "zero2", "zero3"):
        engine = question.around
        buffers = (
            engine.constant + engine.live + engine.bucket + (engine.buckets.bytes if engine.buckets else 0)
        )
        if buffers > BUFFERS_SHARE * max(phases.values()):
            notes.append(
                f"{stack.sharding}'s buffers take {format_bytes(buffers)}: smaller buckets "
                "(engine.deepspeed.reduce_bucket_size) or a lower stage need less"
            )
    return tuple(notes)


def reserved_without_expandable_segments(
    shape: ModelShape, stack: Stack, trainer: Trainer | None = None, lengths: tuple[float, ...] = ()
) -> int:
    """Bytes the caching allocator maps when segments cannot grow: torch's default, and what most runs do."""
    trainer = trainer or ours(stack)
    states = held(shape, stack, trainer)
    question = question_of(shape, stack, trainer)
    temporaries = update(played(question), states, stack, trainer).get("temporaries", 0)
    return replayed_bytes(shape, states, question, temporaries, lengths or (1.0, 1.0))


def ours(stack: Stack) -> Trainer:
    """Our own step, as `stack` has it: without fp32 masters AdamW's states have the dtype of the weights."""
    low = not stack.master_weights and stack.precision == "bf16" and stack.optimizer in ("adamw", "sgd")
    return _variant(stack.loss == "chunked", stack.compile, 2 if low else 4)


@lru_cache(maxsize=16)
def _variant(chunked: bool, compiled: bool, state_bytes: int) -> Trainer:
    return replace(OURS if chunked else OURS_FULL_LOSS, compiled=compiled, state_bytes=state_bytes)


@lru_cache(maxsize=64)
def _undivided(trainer: Trainer) -> Trainer:
    """The same step on a row that is one document: attention's output is not put together from several."""
    return replace(trainer, splits_documents=False)


def question_of(shape: ModelShape, stack: Stack, trainer: Trainer) -> Question:
    trainer = _undivided(trainer) if stack.documents == 1 and trainer.splits_documents else trainer
    c = 2 if stack.precision == "bf16" else 4
    # FSDP2 computes on gathered copies in compute dtype, and so are the gradients before they are reduced.
    weight = c if stack.sharding == "fsdp2" else trainer.weight_bytes or c
    adapter = trainer.adapter_bytes or c
    block = block_of(shape, stack.method, stack.lora_rank, stack.lora_targets)
    # Autocast runs layer norm in fp32, and bitsandbytes' 4-bit layers return the dtype they are given.
    wide = trainer.autocast and block.layer_norm and stack.method == "qlora"
    residual = 4 if trainer.fp32_leftovers or weight == 4 or wide else c
    accumulates = stack.gradient_accumulation_steps > 1 or trainer.gradients_alive
    mastered = trainer.masters and stack.master_weights and c == 2 and stack.sharding in ("single", "ddp")
    in_buckets = stack.sharding == "ddp" and not trainer.gradient_buckets
    return Question(
        block=block,
        layers=shape.num_hidden_layers,
        vocabulary=shape.vocab_size,
        tied=shape.tie_word_embeddings,
        tokens=stack.tokens_per_micro_batch,
        labelled=labelled_tokens(stack),
        sequence=stack.sequence_length,
        widths=Widths(c, residual, weight, c if trainer.autocast else adapter, adapter),
        trainer=trainer,
        checkpointing=stack.activation_checkpointing,
        attention=stack.attention,
        on_cpu=stack.device == "cpu",
        hook_takes_gradients=(accumulates and mastered) or in_buckets,
        kept_gradients=int(accumulates),
        around=around(shape, stack, trainer),
        softcap=shape.model_type == "gemma2",
        quantised_head=trainer.quantised_head and stack.method == "qlora",
    )


def labelled_tokens(stack: Stack) -> int:
    """Positions of the fullest micro-batch that go through the output matrix in our step."""
    tokens = stack.tokens_per_micro_batch
    return tokens if stack.labelled_tokens is None else min(tokens, stack.labelled_tokens)


def _terms(
    sizes: dict[str, int], states: Held, shape: ModelShape, stack: Stack, trainer: Trainer
) -> tuple[MemoryTerm, ...]:
    tokens = stack.tokens_per_micro_batch
    words = dict(states.words)
    kind = stack.activation_checkpointing
    checkpoint = (
        f"the inputs of {kind} layers and the saved tensors of {shape.num_hidden_layers - kind}"
        if isinstance(kind, int)
        else _KEPT[kind]
    )
    words["activations"] = (
        f"{checkpoint}: {shape.num_hidden_layers} layers x {tokens:,} tokens x hidden {shape.hidden_size}"
    )
    labelled = labelled_tokens(stack)
    logits = trainer.loss_tokens(labelled, shape.vocab_size)
    words["loss"] = (
        f"logits of {logits:,} of {labelled:,} labelled tokens x vocabulary {shape.vocab_size:,} at a time"
        if trainer.loss == "fused"
        else f"logits of {tokens:,} tokens x vocabulary {shape.vocab_size:,}, {trainer.loss}"
    )
    words["engine"] = f"buffers and gathered weights of {stack.sharding} over {stack.world_size} ranks"
    words["temporaries"] = "gradients on their way, recomputed values, the optimizer's scratch"
    words["inputs"] = f"4 x 8 B x {tokens:,} tokens: ids, positions, labels"
    return tuple(MemoryTerm(t, sizes[t], words.get(t, "")) for t in TERMS if sizes[t])
