"""The recipe in DeepSpeed's words: every value written out, and compared with what DeepSpeed understood.

DeepSpeed ignores top-level keys it does not know and fills the rest with defaults that change between
releases (gradient clipping became 1.0 in June 2026). So nothing is left to a default, and after initialisation
each value is read back from the live engine; a value that cannot be read back is an error too. Keys:
https://www.deepspeed.ai/docs/config-json/
"""

from collections.abc import Mapping
from typing import Any

from shardwise.errors import RuleError, RunError
from shardwise.recipe.schema import DeepSpeed, Recipe

# Elements. DeepSpeed's own values, which `auto` stands for.
REDUCE_BUCKET = ALLGATHER_BUCKET = 500_000_000
PREFETCH_BUCKET = 50_000_000
PERSISTENCE_THRESHOLD = 100_000
MAX_LIVE = 1_000_000_000
SUB_GROUP = (
    2**24
)  # elements updated, or swapped, at a time (stage 3): its copies of gradients are of that size


def deepspeed_config(
    recipe: Recipe,
    world_size: int,
    accumulation_steps: int,
    trained: int,
    elements: int,
    largest: int,
    pin_memory: bool,
) -> dict[str, Any]:
    """A resolved recipe -> DeepSpeed's configuration.

    `trained`, `elements` and `largest` count elements of trained, of all, and of the largest of the parameters.
    A bucket is a buffer of its full size from the start (fp32 for gradients): it is never made larger than what
    could ever be in it. `pin_memory` only where a GPU can use it.
    """
    training, optimizer = recipe.training, recipe.optimizer
    assert training.micro_batch_size != "auto"
    bf16 = training.precision == "bf16"
    dtype = "bf16" if bf16 else "fp32"
    return {
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": training.micro_batch_size * accumulation_steps * world_size,
        "managed_gradient_accumulation": True,
        "gradient_clipping": optimizer.max_grad_norm or 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",  # gradients are summed over ranks in fp32
        "data_types": {"grad_accum_dtype": "fp32" if accumulation_steps > 1 else dtype},
        "fp16": {"enabled": False},
        "bf16": {
            "enabled": bf16,
            "immediate_grad_update": False,
            "check_grad_overflow": True,  # no update from a gradient that is not finite
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "zero_optimization": _zero(recipe.engine.deepspeed, trained, elements, largest, pin_memory),
        "aio": {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        },
        "zero_allow_untested_optimizer": True,  # ours is given as an object, see engines.deepspeed
        "zero_force_ds_cpu_optimizer": optimizer.name == "adamw",
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
    }


def _zero(section: DeepSpeed, trained: int, elements: int, largest: int, pin_memory: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": section.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": _chosen(section.reduce_bucket_size, REDUCE_BUCKET, trained),
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "allgather_partitions": True,
        "allgather_bucket_size": _chosen(section.allgather_bucket_size, ALLGATHER_BUCKET, trained),
        "sub_group_size": SUB_GROUP,
    }
    if section.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": _chosen(section.prefetch_bucket_size, PREFETCH_BUCKET, elements),
            "stage3_param_persistence_threshold": _chosen(
                section.param_persistence_threshold, PERSISTENCE_THRESHOLD
            ),
            "stage3_max_live_parameters": _chosen(section.max_live_parameters, MAX_LIVE),
            "stage3_max_reuse_distance": _chosen(section.max_live_parameters, MAX_LIVE),
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if section.offload_optimizer != "none":
        zero["offload_optimizer"] = {
            "device": section.offload_optimizer,
            "pin_memory": pin_memory,
            "buffer_count": 4,  # master, gradient and Adam's two states of one sub-group
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": 1.0,
        } | _nvme(section, section.offload_optimizer)
    if section.offload_parameters != "none":
        zero["offload_param"] = {
            "device": section.offload_parameters,
            "pin_memory": pin_memory,
            "buffer_count": 5,
            "buffer_size": largest + 2**20,  # of elements; the rest is room for alignment
            "max_in_cpu": 0 if section.offload_parameters == "nvme" else MAX_LIVE,
        } | _nvme(section, section.offload_parameters)
    return zero


def _nvme(section: DeepSpeed, place: str) -> dict[str, Any]:
    if place != "nvme":
        return {}
    if section.nvme_path is None:
        raise RuleError(
            "engine.deepspeed: offload to nvme without a folder",
            "swapped states need a place on the disk",
            "set engine.deepspeed.nvme_path to a folder on the NVMe disk",
        )
    return {"nvme_path": section.nvme_path}


def _chosen(value: int | str, auto: int, most: int | None = None) -> int:
    chosen = auto if isinstance(value, str) else value
    return chosen if most is None else min(chosen, most)


def compare(asked: Mapping[str, Any], live: Any) -> None:
    """Raise RunError listing every value of `asked` that the live DeepSpeedConfig does not hold."""
    read: dict[str, Any] = {
        "fp16": _dump(live.float16_config),
        "bf16": _dump(live.bfloat16_config),
        "zero_optimization": _dump(live.zero_config),
        "aio": live.aio_config,
        "data_types": {"grad_accum_dtype": live.grad_accum_dtype},
    }
    problems = []
    for key, value in asked.items():
        found = read[key] if key in read else getattr(live, key, "nothing")
        problems += _differences(key, value, found)
    if problems:
        raise RunError(
            "DeepSpeed did not take over its configuration",
            "; ".join(problems),
            "this version of DeepSpeed names or reads these keys in another way; "
            "use a tested one: pip install 'deepspeed==0.19.8'",
        )


def _dump(section: Any) -> dict[str, Any]:
    """A DeepSpeed configuration section by its JSON names (aliases) and its own."""
    return {**section.model_dump(mode="json"), **section.model_dump(mode="json", by_alias=True)}


def _differences(key: str, asked: Any, found: Any) -> list[str]:
    if isinstance(asked, Mapping):
        if not isinstance(found, Mapping):
            return [f"{key}: asked {dict(asked)}, found {found}"]
        return [d for k, v in asked.items() for d in _differences(f"{key}.{k}", v, found.get(k, "nothing"))]
    same = _plain(asked) == _plain(found)
    return [] if same else [f"{key}: asked {asked}, found {found}"]


def _plain(value: Any) -> Any:
    """torch.float32 and 'fp32', Path and str, 1 and 1.0 are the same thing."""
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
    if isinstance(value, bool | int | float) or value is None:
        return value
    return names.get(str(value), str(value).rstrip("/"))
