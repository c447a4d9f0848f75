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


def flat_slices_are_not_matrices(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Muon orthogonalises a matrix, Adafactor averages its rows and columns; ZeRO flattens and cuts anywhere."""
    name = recipe.optimizer.name
    if name in ("muon", "adafactor") and recipe.engine.name == "deepspeed":
        yield Problem(
            "flat_slices_are_not_matrices",
            "engine.name",
            f"optimizer.name: {name} with engine.name: deepspeed",
            f"{name} looks at whole matrices, and ZeRO gives the optimizer slices of all weights in one row",
            "use engine.name: fsdp2, which splits matrices by rows, or optimizer.name: adamw",
            "https://arxiv.org/abs/2502.16982" if name == "muon" else "https://arxiv.org/abs/1804.04235",
        )


def flat_states_are_not_quantised(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """8-bit states are blocks with a scale each; in ZeRO's flat slices a block spans several parameters."""
    name = recipe.optimizer.name
    if recipe.engine.name == "deepspeed" and name.endswith("8bit"):
        yield Problem(
            "flat_states_are_not_quantised",
            "engine.name",
            f"optimizer.name: {name} with engine.name: deepspeed",
            "DeepSpeed reads and writes states parameter by parameter, and 8-bit blocks span several of them",
            "use engine.name: fsdp2, or optimizer.name: adamw (with offload_optimizer: cpu if states do not fit)",
            "https://huggingface.co/docs/bitsandbytes/main/en/optimizers",
        )


def offloaded_states_are_not_paged(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Paging moves states between device and host; offloaded ones are in the host for good."""
    section, name = recipe.engine.fsdp2, recipe.optimizer.name
    if recipe.engine.name == "fsdp2" and section.cpu_offload and name == "paged_adamw_8bit":
        yield Problem(
            "offloaded_states_are_not_paged",
            "optimizer.name",
            "optimizer.name: paged_adamw_8bit with engine.fsdp2.cpu_offload: true",
            "offloaded states are updated in host memory; there is nothing to page",
            "use optimizer.name: adamw_8bit, or engine.fsdp2.cpu_offload: false",
            "https://huggingface.co/docs/bitsandbytes/main/en/optimizers",
        )


def offloaded_update_is_adam_or_sgd(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """The update on the host is DeepSpeed's own vectorised AdamW or torch's SGD; swapping to disk knows the first."""
    section, name = recipe.engine.deepspeed, recipe.optimizer.name
    if recipe.engine.name == "deepspeed" and section.offload_optimizer == "nvme" and name == "sgd":
        yield Problem(
            "offloaded_update_is_adam_or_sgd",
            "optimizer.name",
            f"optimizer.name: {name} with engine.deepspeed.offload_optimizer: nvme",
            "DeepSpeed swaps the states of DeepSpeedCPUAdam",
            "use optimizer.name: adamw, or offload_optimizer: cpu",
            "https://deepspeed.readthedocs.io/en/latest/optimizers.html",
        )


def zero_3_is_not_compiled(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Stage 3 gathers weights in hooks on every module: torch breaks at each and compiles each anew."""
    zero_3 = recipe.engine.name == "deepspeed" and recipe.engine.deepspeed.zero_stage == 3
    if recipe.training.compile and zero_3:
        yield Problem(
            "zero_3_is_not_compiled",
            "training.compile",
            "training.compile: true with engine.deepspeed.zero_stage: 3",
            "ZeRO-3 gathers weights in hooks on every module; torch compiles each hook and each module by itself "
            "until it gives up, and nothing is gained",
            "use training.compile: false, or engine.name: fsdp2",
            "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
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
    flat_slices_are_not_matrices,
    flat_states_are_not_quantised,
    offloaded_states_are_not_paged,
    offloaded_update_is_adam_or_sgd,
    zero_3_is_not_compiled,
    batch_divides,
)
