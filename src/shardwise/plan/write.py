"""A chosen option as the recipe that trains exactly that."""

from typing import Any

from shardwise.plan.search import Option
from shardwise.recipe.schema import Recipe

DATA_PLACEHOLDER = "train.jsonl"
NVME_PLACEHOLDER = "nvme"  # only a person knows where the fast disk is


def recipe_of(
    option: Option, model: str, data: str | None, epochs: float, revision: str | None = None
) -> Recipe:
    """Every decision of the option written out; what it did not decide stays `auto`."""
    s = option.plan.stack
    tree: dict[str, Any] = {
        "model": {"source": model, "revision": revision},
        "data": {"train": data or DATA_PLACEHOLDER, "sequence_length": s.sequence_length},
        "method": s.method,
        "optimizer": {"name": s.optimizer, "master_weights": s.master_weights},
        "training": {
            "epochs": epochs,
            "global_batch_size": s.global_batch_size,
            "micro_batch_size": s.micro_batch_size,
            "precision": s.precision,
            "activation_checkpointing": s.activation_checkpointing,
            "loss": s.loss,
            "compile": s.compile,
        },
        "engine": {
            "name": "deepspeed" if s.sharding.startswith("zero") else s.sharding,
            "device": s.device,
            "processes": s.world_size if option.plan.offer.nodes == 1 else s.gpus_per_node,
        },
    }
    offer = option.plan.offer
    if s.device == "cuda":
        tree["launch"] = {"nodes": offer.nodes, "gpus": f"{offer.gpus_per_node}x{offer.gpu.name}"}
    if s.method != "full":
        tree["lora"] = {"rank": s.lora_rank, "alpha": 2.0 * s.lora_rank, "targets": s.lora_targets}
    if s.sharding == "fsdp2":
        tree["engine"]["fsdp2"] = {
            "dp_replicate": s.dp_replicate,
            "reshard_after_forward": s.reshard_after_forward,
            "cpu_offload": s.offload_parameters == "cpu",
        }
    elif s.sharding.startswith("zero"):
        tree["engine"]["deepspeed"] = {
            "zero_stage": int(s.sharding[-1]),
            "offload_optimizer": s.offload_optimizer,
            "offload_parameters": s.offload_parameters,
        }
        if "nvme" in (s.offload_optimizer, s.offload_parameters):
            tree["engine"]["deepspeed"]["nvme_path"] = NVME_PLACEHOLDER
    return Recipe.model_validate(tree)
