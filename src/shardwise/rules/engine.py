"""Which engine can do what."""

from collections.abc import Iterator

from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules.problem import Problem, Situation

ZERO = "https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training"
FSDP = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"


def one_process_for_single(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """`single` has no way to share work."""
    processes = recipe.engine.processes
    if recipe.engine.name == "single" and isinstance(processes, int) and processes > 1:
        yield Problem(
            "one_process_for_single",
            "engine.name",
            f"engine.name: single with engine.processes: {processes}",
            "the single engine does not exchange gradients: the ranks would train separate models",
            "use engine.name: ddp, or engine.processes: 1",
            DDP,
        )


def replicas_divide_ranks(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """HSDP is a grid: replicas x shards."""
    processes, replicas = recipe.engine.processes, recipe.engine.fsdp2.dp_replicate
    if recipe.engine.name != "fsdp2" or not isinstance(processes, int) or processes % replicas == 0:
        return
    legal = [n for n in range(1, processes + 1) if processes % n == 0]
    near = min(legal, key=lambda n: abs(n - replicas))
    yield Problem(
        "replicas_divide_ranks",
        "engine.fsdp2.dp_replicate",
        f"engine.fsdp2.dp_replicate: {replicas} does not divide {processes} ranks",
        "every replica is sharded over the same number of ranks",
        f"use engine.fsdp2.dp_replicate: {near}",
        FSDP,
    )


def parameter_offload_needs_stage_3(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Below stage 3 every rank needs its whole parameters all the time."""
    section = recipe.engine.deepspeed
    if recipe.engine.name == "deepspeed" and section.offload_parameters != "none" and section.zero_stage != 3:
        yield Problem(
            "parameter_offload_needs_stage_3",
            "engine.deepspeed.zero_stage",
            f"engine.deepspeed: offload_parameters {section.offload_parameters}, zero_stage {section.zero_stage}",
            "only stage 3 splits parameters, so only there can they lie elsewhere between uses",
            "use engine.deepspeed.zero_stage: 3, or offload_optimizer alone",
            ZERO,
        )


def nvme_offload_needs_stage_3(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """ZeRO-Infinity is stage 3."""
    section = recipe.engine.deepspeed
    if recipe.engine.name == "deepspeed" and section.offload_optimizer == "nvme" and section.zero_stage != 3:
        yield Problem(
            "nvme_offload_needs_stage_3",
            "engine.deepspeed.zero_stage",
            f"engine.deepspeed.offload_optimizer: nvme with zero_stage: {section.zero_stage}",
            "states are swapped to NVMe in stage 3 only",
            "use engine.deepspeed.zero_stage: 3, or offload_optimizer: cpu",
            ZERO,
        )


def nvme_needs_a_folder(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Swapped states need a place."""
    section = recipe.engine.deepspeed
    places = (section.offload_optimizer, section.offload_parameters)
    if recipe.engine.name == "deepspeed" and "nvme" in places and not section.nvme_path:
        yield Problem(
            "nvme_needs_a_folder",
            "engine.deepspeed.nvme_path",
            "engine.deepspeed: offload to nvme without nvme_path",
            "swapped states are files, and their place is for you to choose",
            "set engine.deepspeed.nvme_path to a folder on the NVMe disk",
            ZERO,
        )


def deepspeed_keeps_masters(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Its bf16 mode has fp32 masters; the mode without them is tied to its own CPU optimizer."""
    if recipe.engine.name == "deepspeed" and not recipe.optimizer.master_weights:
        yield Problem(
            "deepspeed_keeps_masters",
            "optimizer.master_weights",
            "optimizer.master_weights: false with engine.name: deepspeed",
            "DeepSpeed's bf16 training keeps fp32 masters",
            "use optimizer.master_weights: true, or engine.name: fsdp2",
            "https://www.deepspeed.ai/docs/config-json/#bfloat16-training-options",
        )


def sharded_updates_are_elementwise(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Muon orthogonalises a matrix, Adafactor averages its rows and columns: a shard is not a matrix."""
    name, engine = recipe.optimizer.name, recipe.engine.name
    if name in ("muon", "adafactor") and engine in ("fsdp2", "deepspeed"):
        yield Problem(
            "sharded_updates_are_elementwise",
            "optimizer.name",
            f"optimizer.name: {name} with engine.name: {engine}",
            f"{name} needs whole matrices, and {engine} gives the optimizer slices of them",
            "use optimizer.name: adamw, or engine.name: ddp",
            "https://arxiv.org/abs/2502.16982" if name == "muon" else "https://arxiv.org/abs/1804.04235",
        )


def split_states_are_not_quantised(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """8-bit states are blocks with a scale each; a block across two ranks cannot be saved by parameter."""
    name, engine = recipe.optimizer.name, recipe.engine.name
    if engine in ("fsdp2", "deepspeed") and name.endswith("8bit"):
        offload = "engine.fsdp2.cpu_offload: true" if engine == "fsdp2" else "offload_optimizer: cpu"
        yield Problem(
            "split_states_are_not_quantised",
            "optimizer.name",
            f"optimizer.name: {name} with engine.name: {engine}",
            "8-bit states come in blocks that do not end where shards do: no other number of ranks could load them",
            f"use optimizer.name: adamw (with {offload} if states do not fit), or engine.name: ddp",
            "https://huggingface.co/docs/bitsandbytes/main/en/optimizers",
        )


def offloaded_update_is_adam(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """DeepSpeed's host update is its own vectorised AdamW."""
    section, name = recipe.engine.deepspeed, recipe.optimizer.name
    if recipe.engine.name == "deepspeed" and section.offload_optimizer != "none" and name != "adamw":
        yield Problem(
            "offloaded_update_is_adam",
            "optimizer.name",
            f"optimizer.name: {name} with engine.deepspeed.offload_optimizer: {section.offload_optimizer}",
            "the update on the host is DeepSpeedCPUAdam",
            "use optimizer.name: adamw, or offload_optimizer: none",
            "https://deepspeed.readthedocs.io/en/latest/optimizers.html",
        )


def batch_divides(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """global = micro x ranks x accumulation, all whole numbers."""
    training, processes = recipe.training, recipe.engine.processes
    whole, micro = training.global_batch_size, training.micro_batch_size
    if not isinstance(whole, int) or not isinstance(micro, int) or not isinstance(processes, int):
        return
    unit = micro * processes
    if whole % unit:
        near = sorted({max(1, whole // unit) * unit, (whole // unit + 1) * unit})
        yield Problem(
            "batch_divides",
            "training.global_batch_size",
            f"training.global_batch_size: {whole} is no multiple of {micro} x {processes}",
            f"a step gives every rank the same number of micro-batches of micro_batch_size {micro}",
            f"use training.global_batch_size: {' or '.join(map(str, near))}",
            "https://arxiv.org/abs/1706.02677",
        )


RULES = (
    one_process_for_single,
    replicas_divide_ranks,
    parameter_offload_needs_stage_3,
    nvme_offload_needs_stage_3,
    nvme_needs_a_folder,
    deepspeed_keeps_masters,
    sharded_updates_are_elementwise,
    split_states_are_not_quantised,
    offloaded_update_is_adam,
    batch_divides,
)
