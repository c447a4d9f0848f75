"""Seconds that one rank's processor needs for a micro-batch, by what it does. No communication here.

T tokens of a micro-batch in documents of S, H hidden size, F width of the MLP, N parameters.
A matrix product of T rows with P weights takes max(2 T P / (peak x sustained x fill), bytes / bandwidth).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import hypot

from shardwise.estimate.speed import constants as c
from shardwise.estimate.speed.hooks import Engine, engine_of, hook_operations
from shardwise.estimate.stack import Checkpointing, Stack
from shardwise.facts.gpus import Gpu
from shardwise.facts.model import ModelShape


@dataclass(frozen=True, slots=True)
class Program:
    """What a training program does that a recipe does not say. The defaults are ours.

    checkpointed: the share of layers recomputed under full checkpointing. fused: "kernels" for norms and rotary
    embeddings, "all" for activations and residual sums too. experts: "grouped" (one kernel for all) or "looped"
    (each a linear layer of its own, which 4-bit loading quantises too). fp32_adapters: on a bf16 base.
    fp32_residual: norms and the residual stream in fp32 (4-bit models prepared the usual way). adapter_units: FSDP
    wraps every adapter matrix on its own. engine: the ZeRO stage of a program that uses one on a single rank.
    autocast: layers run under autocast, which computes a softmax that is written out in fp32. paged: optimizer states
    move to the host when the device is full.
    """

    checkpointed: float = 1.0
    fused: str = "none"
    experts: str = "grouped"
    fp32_adapters: bool = False
    fp32_residual: bool = False
    adapter_units: bool = False
    engine: str = ""
    autocast: bool = False
    paged: bool = False


OURS = Program()


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a whole micro-batch on one rank, forward + backward + recomputation; and its FLOPs."""

    matrix: float
    attention: float
    elementwise: float
    dequantise: float
    loss: float
    launch: float  # time the host needs to issue everything
    forward_share: float
    needed_flops: float  # without recomputation
    serial: bool = False  # the host is the device

    @property
    def busy(self) -> float:
        """Seconds of the device, if it never waits for the host."""
        return self.matrix + self.attention + self.elementwise + self.dequantise + self.loss

    @property
    def seconds(self) -> float:
        """Device and the host that feeds it, partly side by side: the root of the sum of squares.

        A processor does both itself, one after the other.
        """
        return self.busy + self.launch if self.serial else hypot(self.busy, self.launch)


@lru_cache(maxsize=65536)
def micro_batch_work(
    shape: ModelShape,
    gpu_key: tuple[str, float, float, float, float],
    method: str,
    rank: int,
    targets: str | tuple[str, ...],
    tokens: int,
    sequence: float,
    labelled: float,
    checkpointing: Checkpointing,
    precision: str,
    attention: str,
    compiled: bool,
    program: Program,
    engine: Engine,
) -> Work:
    """One rank's work for `tokens` tokens, the share `labelled` of them with a label, in documents of `sequence`."""
    capability, peak, share, bandwidth, op_seconds = gpu_key
    speed, stream = peak * share, bandwidth * c.BANDWIDTH
    again = _again(checkpointing, shape, program)
    passes = (3 if method == "full" else 2) + again
    size = 4 if precision == "fp32" else 2

    dense, expert, head = _matrix_parameters(shape)
    fill = _fill(tokens) * _depth(shape.hidden_size)
    per_pass = max(2 * tokens * dense / (speed * fill), dense * size / stream)
    matrix = passes * per_pass
    needed = 2.0 * tokens * dense * (3 if method == "full" else 2)
    if expert:
        rows = tokens * shape.experts_per_token
        touched = min(shape.num_experts, rows)
        per_expert = rows / shape.num_experts
        active = expert * shape.experts_per_token / shape.num_experts
        flops = 2 * tokens * active / (speed * _fill(per_expert) * _depth(shape.hidden_size))
        matrix += passes * max(flops, expert * touched / shape.num_experts * size / stream)
        needed += 2 * tokens * active * (3 if method == "full" else 2)
    adapters = shape.lora_parameters(rank, targets) if method != "full" else 0
    if adapters:
        # three products of low rank, each streaming its input and output
        matrix += 3 * 2 * tokens * adapters / (speed * 0.5)
    head_passes = 3.0 if method == "full" else 2
    scored = tokens * labelled  # our loss, and fused ones, look at no other position
    loss = head_passes * max(2 * scored * head / (speed * fill), head * size / stream)
    loss += scored * shape.vocab_size * 24 / stream
    needed += head_passes * 2 * scored * head

    attention_flops = _attention_flops(shape, tokens, sequence)
    forward, backward = _attention_seconds(shape, attention_flops, tokens, sequence, capability, speed / share,
                                           stream, attention, size, program.autocast)  # fmt: skip
    attention_total = forward * (1 + (0 if checkpointing == "selective" else again)) + backward
    needed += 3 * attention_flops

    compiled = compiled or program.fused == "all"
    elementwise = _elementwise_bytes(shape, size, compiled, program) * tokens / stream
    if adapters:
        elementwise += tokens * _adapter_bytes(shape, targets, compiled, program) / stream
    elementwise *= (3 + again) / c.CACHED.get(capability, 1.0)
    if not compiled:
        elementwise *= c.EAGER
    dequantise = 0.0
    if method == "qlora":
        uses = 2 + again
        quantised = shape.quantised_parameters + (expert if program.experts == "looped" else 0)
        dequantise = uses * quantised / c.DEQUANTISED_PER_SECOND

    looped = program.experts == "looped"
    operations = _operations(shape, method, targets, again, compiled, looped)
    operations += hook_operations(shape, engine, method, targets, again, looped, program.adapter_units)
    launch = operations * op_seconds
    return Work(
        matrix=matrix,
        attention=attention_total,
        elementwise=elementwise,
        dequantise=dequantise,
        loss=loss,
        launch=launch,
        forward_share=1 / (passes or 1),
        needed_flops=needed,
        serial=capability == "cpu",
    )


def work_of(shape: ModelShape, gpu: Gpu, stack: Stack, program: Program = OURS) -> Work:
    """`micro_batch_work` of a stack on a GPU."""
    op = gpu.op_seconds or c.OP_SECONDS
    gpu_key = (
        gpu.capability,
        gpu.peak_flops(stack.precision),
        gpu.sustained,
        gpu.bandwidth_bytes_per_second,
        op,
    )
    # eager attention scores whole sequences and masks; full logits are made for every token
    attended = stack.sequence_length if stack.attention == "eager" else stack.attended_tokens
    labelled = stack.labelled_share if stack.loss == "chunked" else 1.0
    return micro_batch_work(
        shape, gpu_key, stack.method, stack.lora_rank, stack.lora_targets, stack.tokens_per_micro_batch,
        attended, labelled, stack.activation_checkpointing, stack.precision, stack.attention, stack.compile, program,
        engine_of(stack, program.engine),
    )  # fmt: skip


def _again(checkpointing: Checkpointing, shape: ModelShape, program: Program) -> float:
    """Share of a forward that is computed a second time; selective checkpointing spares attention of it.

    Matrix products per weight are forward, input gradient, weight gradient if trained, and this share.
    """
    if isinstance(checkpointing, int):
        return checkpointing / shape.num_hidden_layers
    return 0.0 if checkpointing == "none" else program.checkpointed


@lru_cache(maxsize=256)
def _matrix_parameters(shape: ModelShape) -> tuple[int, int, int]:
    """Weights that every token is multiplied with, all experts' weights, and the output head's."""
    dense = shape.count("linear", "router", part="text")
    head = shape.vocab_size * shape.hidden_size
    return dense, shape.count("expert"), head


def _depth(width: int) -> float:
    """Short inner sums leave a product's start and end visible; 1 for a width of 8,192."""
    return width / (width + c.SHORT_SUM) * (1 + c.SHORT_SUM / 8192)


def _fill(rows: float) -> float:
    """How full the tiles of a product with that many rows are: 1 for many, less when the last tile is ragged."""
    if rows <= 0:
        return 1.0
    tiles = -(-rows // c.TILE)
    return rows / (tiles * c.TILE) if rows >= c.TILE / 2 else 0.5


def _attention_flops(shape: ModelShape, tokens: int, sequence: float) -> float:
    """Forward FLOPs of scores and values, causal half, sliding windows respected."""
    width = shape.num_attention_heads * shape.head_dim
    window = shape.sliding_window
    full = shape.full_attention_layers
    windowed = shape.num_hidden_layers - full if window else 0  # without a window: layers of another kind
    reach = sequence / 2
    short = min(window or sequence, sequence)
    short_reach = short - short * short / (2 * sequence)  # mean keys a query sees
    return 4 * tokens * width * (full * reach + windowed * short_reach)


def _attention_seconds(
    shape: ModelShape,
    flops: float,
    tokens: int,
    sequence: float,
    capability: str,
    peak: float,
    stream: float,
    kind: str,
    size: int,
    autocast: bool,
) -> tuple[float, float]:
    """Seconds of all layers' attention cores, forward and backward."""
    width = shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    traffic = tokens * (2 * width + 2 * kv) * size * shape.num_hidden_layers / stream
    if kind == "eager":
        # Dense, not causal. Reads and writes per score: product 2, scaling 4, mask 4, softmax to fp32 6, back 6,
        # product 2; under autocast the softmax's input is cast in a kernel of its own.
        square = tokens * sequence * shape.num_attention_heads * shape.num_hidden_layers
        forward = 2 * flops / peak / 0.5 + square * (32 if autocast else 24) / stream
        return forward + traffic, 2 * forward + 2 * traffic
    newer = c.ATTENTION_NEWER if capability in ("9.0", "10.0", "10.3") else 1.0
    if capability == "cpu":
        newer = c.ATTENTION_CPU
    if shape.family in _BIASED_ATTENTION:
        newer /= c.ATTENTION_BIASED
    elif shape.head_dim < 128:  # smaller heads fill the matrix units less (arXiv 2307.08691, figure 4)
        newer *= c.ATTENTION_SMALL_HEAD
    forward = flops / (peak * c.ATTENTION_FORWARD * newer)
    backward = 2.5 * flops / (peak * c.ATTENTION_BACKWARD * newer)
    return max(forward, traffic), max(backward, 2 * traffic)


_BIASED_ATTENTION = ("mpt", "bloom", "baichuan")  # ALiBi


def _elementwise_bytes(shape: ModelShape, size: int, compiled: bool, program: Program) -> float:
    """Bytes per token and forward that norms, rotary embeddings, activations and residual sums move."""
    h, q = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    width = _mlp_width(shape)
    layer_norm = any((t.kind == "bias" and "norm" in t.name) or ".ln_" in t.name for t in shape.tensors)
    norms = 4 if shape.family in ("gemma2", "gemma3_text", "glm4") else 2
    # An RMS norm written out in fp32 moves about 34 bytes per element; one kernel 2 reads and 1 write.
    fused = compiled or program.fused == "kernels"
    norm = 3 * size if fused or layer_norm or shape.mlp == "plain" else 34
    if program.fp32_residual:
        norm += 12  # fp32 in and out, and the cast to bf16 before each product
    rotary = (3 if fused else 9) * size * (q + kv)
    activation = (3 if compiled else 5) * size * width if shape.mlp == "gated" else 2 * size * width
    residual = 0 if compiled else 2 * 3 * (4 if program.fp32_residual else size) * h
    per_layer = norms * norm * h + rotary + activation + residual
    return per_layer * shape.num_hidden_layers


def _mlp_width(shape: ModelShape) -> int:
    if not shape.is_moe:
        return shape.intermediate_size
    routed = shape.experts_per_token * shape.moe_intermediate_size
    # gathering tokens for an expert, weighting and adding its output back: three times an activation's traffic
    return routed + shape.shared_expert_intermediate_size + 3 * shape.experts_per_token * shape.hidden_size


@lru_cache(maxsize=1024)
def _adapter_widths(shape: ModelShape, targets: str | tuple[str, ...]) -> tuple[int, int]:
    groups = shape.adapted(targets)
    return sum((t.shape[0] + t.shape[1]) * t.count for t in groups), sum(t.count for t in groups)


def _adapter_bytes(
    shape: ModelShape, targets: str | tuple[str, ...], compiled: bool, program: Program
) -> float:
    """An adapter reads its input again and adds its output to the base's: per token over all layers."""
    each = c.ADAPTER_FP32_BYTES if program.fp32_adapters else c.ADAPTER_BYTES
    return _adapter_widths(shape, targets)[0] * (each / 2 if compiled else each)


@lru_cache(maxsize=4096)
def _operations_of(
    shape: ModelShape, method: str, targets: str | tuple[str, ...], compiled: bool, looped: bool
) -> tuple[float, float]:
    """Operations the host issues in one forward, and the share that only adapters and backward add."""
    ops = float(c.OPS_PER_LAYER * shape.num_hidden_layers)
    if shape.is_moe:
        ops += len(shape.moe_layers) * (shape.num_experts * c.OPS_PER_EXPERT if looped else 25)
    if method != "full":
        ops += c.OPS_PER_ADAPTER * _adapter_widths(shape, targets)[1]
    if method == "qlora":
        ops += c.OPS_PER_DEQUANTISED * sum(t.count for t in shape.tensors if t.kind == "linear")
    return (ops * (c.COMPILED_OPS if compiled else 1.0)), 0.0


def _operations(
    shape: ModelShape,
    method: str,
    targets: str | tuple[str, ...],
    again: float,
    compiled: bool,
    looped: bool,
) -> float:
    """Operations of forward, backward (twice as many) and recomputation."""
    forward, _ = _operations_of(shape, method, targets, compiled, looped)
    return forward * (3 + again)
