"""Seconds of one optimizer step of a stack on an offer, and where they go."""

from dataclasses import dataclass, replace

from shardwise.estimate.memory.formula import estimate_memory, ours
from shardwise.estimate.speed import constants as c
from shardwise.estimate.speed.collectives import Group, group
from shardwise.estimate.speed.layer import OURS, Program, Work, work_of
from shardwise.estimate.stack import Stack
from shardwise.facts.gpus import Gpu
from shardwise.facts.model import ModelShape


@dataclass(frozen=True, slots=True)
class SpeedPart:
    """One share of a step: seconds, and in words what they are spent on."""

    name: str
    seconds: float
    words: str


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """Time of one optimizer step. `low` and `high` bound it: see `spread` for how far and why.

    `mfu` counts the model's needed FLOPs (6 per weight and token when all are trained, 4 with frozen weights,
    attention's causal half, no recomputation) against the vendor's dense peak.
    """

    step_seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_step: int
    tokens_per_second_per_gpu: float
    mfu: float
    parts: tuple[SpeedPart, ...]
    bound_by: str
    notes: tuple[str, ...] = ()

    @property
    def low_tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second_per_gpu * self.step_seconds / self.high_seconds

    @property
    def high_tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second_per_gpu * self.step_seconds / self.low_seconds


def estimate_speed(shape: ModelShape, gpu: Gpu, stack: Stack, program: Program = OURS) -> SpeedEstimate:
    """Time of one optimizer step of `stack` on `gpu`s."""
    work, exposed, update, moved = _shares(shape, gpu, stack, program)
    micro_batches = stack.gradient_accumulation_steps
    alone = work.seconds * micro_batches + exposed + update + moved
    step = alone * gpu.pace
    tokens = stack.tokens_per_micro_batch * micro_batches * stack.world_size
    per_gpu = tokens / stack.world_size / step
    peak = gpu.peak_flops(stack.precision)
    low, high = spread(shape, gpu, stack, work, exposed / alone)
    waiting = (work.seconds - work.busy) * micro_batches
    parts: tuple[SpeedPart, ...] = (
        SpeedPart("matrix products", work.matrix * micro_batches, "2 FLOPs per weight, token and pass"),
        SpeedPart("attention", work.attention * micro_batches, "4 x tokens x keys x width, causal half"),
        SpeedPart("element-wise", work.elementwise * micro_batches, "bytes moved / memory bandwidth"),
        SpeedPart("loss", work.loss * micro_batches, "output matrix and softmax over the vocabulary"),
        SpeedPart("dequantisation", work.dequantise * micro_batches, "4-bit weights unpacked at every use"),
        SpeedPart("waiting for the host", waiting, "operations are issued one by one, slower than some run"),
        SpeedPart("communication", exposed, "collectives that compute does not hide"),
        SpeedPart("optimizer", update, "weights, gradients and states read and written once"),
        SpeedPart("offload", moved, "traffic between device, host and disk, and the update on the host"),
    )
    parts = tuple(replace(p, seconds=p.seconds * gpu.pace) for p in parts if p.seconds > 0)
    return SpeedEstimate(
        step_seconds=step,
        low_seconds=step * low,
        high_seconds=step * high,
        tokens_per_step=tokens,
        tokens_per_second_per_gpu=per_gpu,
        mfu=work.needed_flops * micro_batches / step / peak,
        parts=parts,
        bound_by=max(parts, key=lambda p: p.seconds).name,
    )


def step_seconds(shape: ModelShape, gpu: Gpu, stack: Stack, program: Program = OURS) -> float:
    """`estimate_speed`'s time of a step alone, for a search that compares many."""
    work, *rest = _shares(shape, gpu, stack, program)
    return (work.seconds * stack.gradient_accumulation_steps + sum(rest)) * gpu.pace


def _shares(shape: ModelShape, gpu: Gpu, stack: Stack, program: Program) -> tuple[Work, float, float, float]:
    """Work of one micro-batch; and of a step: exposed communication, update, offload, in seconds."""
    work = work_of(shape, gpu, stack, program)
    exposed = _communication(shape, gpu, stack, work)
    update, moved = _update(shape, gpu, stack)
    if stack.optimizer.startswith("paged") or program.paged:
        moved += _paging(shape, gpu, stack)
    return work, exposed, update, moved


def trained_parameters(shape: ModelShape, stack: Stack) -> int:
    if stack.method == "full":
        return shape.total_parameters - shape.vision_parameters
    return shape.lora_parameters(stack.lora_rank, stack.lora_targets, stack.dora)


def _layer_bytes(shape: ModelShape, stack: Stack) -> float:
    """Bytes gathered for one layer: bf16 weights, or what 4-bit weights weigh."""
    size = 4 if stack.precision == "fp32" else 2
    if stack.method == "qlora":
        quantised = shape.quantised_parameters / shape.num_hidden_layers
        return 0.53 * quantised + size * max(0.0, shape.layer_parameters - quantised)
    return float(size * shape.layer_parameters)


def _communication(shape: ModelShape, gpu: Gpu, stack: Stack, work: Work) -> float:
    """Seconds of a step that compute waits for collectives, or is slowed by them."""
    n = stack.world_size
    if n == 1:
        return 0.0
    size = 4 if stack.precision == "fp32" else 2
    micro = stack.gradient_accumulation_steps
    trained = trained_parameters(shape, stack)
    forward = work.seconds * work.forward_share
    backward = work.seconds - forward
    if stack.sharding in ("ddp", "zero1", "zero2"):
        everyone = group(gpu, n, stack.gpus_per_node)
        reduce = _exposed(everyone.reduce_seconds(size * trained), backward)
        if stack.sharding == "ddp":
            return reduce
        times = micro if stack.sharding == "zero2" else 1
        return times * reduce + everyone.gather_seconds(size * trained)
    shard = group(gpu, stack.dp_shard, stack.gpus_per_node)
    layers = shape.num_hidden_layers
    gather = shard.gather_seconds(_layer_bytes(shape, stack))
    gathers_backward, hidden = _gathers_backward(shape, stack), _prefetched(shape, stack)
    scatter = shard.gather_seconds(_gradient_bytes(stack) * trained / layers)
    per_layer_forward, per_layer_backward = forward / layers, backward / layers
    talk_forward, talk_backward = gather, gather * gathers_backward + scatter
    exposed = _exposed(talk_forward, per_layer_forward, hidden)
    exposed += _exposed(talk_backward, per_layer_backward, hidden)
    root = shard.gather_seconds(size * (shape.total_parameters - layers * shape.layer_parameters))
    total = micro * (layers * exposed + root + gather)
    if stack.dp_replicate > 1:
        replicas = group(gpu, stack.dp_replicate, stack.gpus_per_node, stack.dp_shard)
        reduce = replicas.reduce_seconds(_gradient_bytes(stack) * trained / stack.dp_shard)
        total += _exposed(reduce, backward)
    return total


def _exposed(talk: float, compute: float, ahead: float = 1.0) -> float:
    """Seconds of a collective that `compute` seconds beside it do not hide. `ahead`: the share issued early."""
    return max(talk - ahead * compute, (1 - ahead * c.OVERLAP) * talk)


def _gathers_backward(shape: ModelShape, stack: Stack) -> float:
    """How often a layer is gathered again for its recomputation and backward.

    FSDP2 keeps a layer between the two. ZeRO-3 frees a parameter after each use unless it is needed again within
    max_reuse_distance parameters (as many as max_live_parameters here); in a recomputed layer of P parameters
    that distance runs from 0 to 2 P.
    """
    if stack.sharding != "zero3":
        return 1.0 if stack.reshard_after_forward else 0.0
    kind = stack.activation_checkpointing
    again = kind / shape.num_hidden_layers if isinstance(kind, int) else float(kind == "full")
    return 1.0 + again * (1.0 - min(1.0, stack.max_live_parameters / (2 * shape.layer_parameters)))


def _prefetched(shape: ModelShape, stack: Stack) -> float:
    """Share of a layer that is gathered while the one before computes.

    ZeRO-3 stops fetching at max_live_parameters, which one layer of the largest models already fills.
    """
    if stack.sharding != "zero3":
        return 1.0
    return min(1.0, max(0.0, stack.max_live_parameters / shape.layer_parameters - 1))


def _gradient_bytes(stack: Stack) -> int:
    """Bytes per gradient element on the wire: FSDP2 reduces in fp32 for safety of the sum."""
    return 4 if stack.sharding == "fsdp2" or stack.precision == "fp32" else 2


def _update(shape: ModelShape, gpu: Gpu, stack: Stack) -> tuple[float, float]:
    """(seconds of the optimizer step on the device, seconds of offload traffic and host update) per step."""
    trained = trained_parameters(shape, stack)
    sharded = stack.sharding not in ("single", "ddp")
    local = trained / stack.dp_shard if sharded else float(trained)
    stream = gpu.bandwidth_bytes_per_second * c.BANDWIDTH
    moved = 0.0
    pcie = gpu.pcie.bytes_per_second * c.PCIE
    if stack.offload_parameters != "none":
        weights = shape.total_parameters * (0.53 if stack.method == "qlora" else 2) / stack.dp_shard
        uses = 2 if stack.reshard_after_forward or stack.sharding == "zero3" else 1
        moved += uses * weights / pcie * stack.gradient_accumulation_steps
    if stack.offload_optimizer != "none":
        host = gpu.dram_bytes_per_second * c.HOST_SHARE / stack.gpus_per_node
        moved += local * c.HOST_ADAM_BYTES / host + local * (4 + 2) / pcie
        if stack.offload_optimizer == "nvme":
            disk = min(gpu.disk_read_bytes_per_second, gpu.disk_write_bytes_per_second) / stack.gpus_per_node
            moved += local * 12 * 2 / disk
        return 0.0, moved
    bytes_per_element = 8 if "8bit" in stack.optimizer else 30
    return local * bytes_per_element / stream + 2e-3, moved


def _paging(shape: ModelShape, gpu: Gpu, stack: Stack) -> float:
    """Seconds that a paged optimizer's states need to come and go over PCIe: those that find no room.

    Managed memory is fetched ahead page by page (cudaMemPrefetchAsync, as bitsandbytes does), at PCIe's rate.
    """
    if gpu.kind != "cuda":
        return 0.0
    memory = estimate_memory(shape, stack, replace(ours(stack), state_bytes=4))
    # A program's paged fp32 states are counted as if they had to stay.
    states = memory.paged_bytes or memory.term("optimizer")
    over = memory.needed_bytes + memory.paged_bytes - gpu.usable_bytes
    paged = min(max(0, over), states)
    return 2 * paged / (gpu.pcie.bytes_per_second * c.PCIE)


def spread(
    shape: ModelShape, gpu: Gpu, stack: Stack, work: Work, exposed_share: float
) -> tuple[float, float]:
    """Factors on the step time that bound it, by what is least sure about it.

    The base is how measured runs of well-known stacks scatter around the estimate; hosts differ (launch-bound
    steps), so do networks (exposed communication), mixtures of experts (routing) and consumer hosts.
    """
    low, high = 0.80, 1.30
    if work.launch > 0.8 * work.busy:
        low, high = 0.60, 1.8
    if exposed_share > 0.15:
        low, high = low * 0.85, high * 1.3
    if shape.is_moe:
        high *= 1.6
    if stack.offload_optimizer != "none" or stack.offload_parameters != "none":
        low, high = low * 0.8, high * 1.4
    if gpu.kind != "cuda" and not gpu.measured:
        low, high = low * 0.75, high * 1.5
    return low, high


__all__ = ["Group", "Program", "SpeedEstimate", "SpeedPart", "estimate_speed"]
