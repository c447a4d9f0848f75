"""Variables for the communication libraries, per fabric: only where a library cannot find out, each with its reason.

Inside a node nothing is set: NCCL finds NVLink and NVSwitch by itself, and a variable could only make it worse.
The variables are those of the NVIDIA NCCL user guide ("Environment Variables"), PyTorch ("Flight Recorder") and the
AWS aws-ofi-nccl README, written down from memory and not yet tried on such fabrics.
"""

from dataclasses import dataclass

from shardwise.recipe import Recipe


@dataclass(frozen=True)
class Variable:
    """One line of a generated script: `export NAME=value  # reason`."""

    name: str
    value: str
    reason: str


def variables(recipe: Recipe) -> tuple[Variable, ...]:
    """What every node of a launched run gets beside the variables that a person hands on."""
    launch = recipe.launch
    found: list[Variable] = []
    if launch.cache is not None:
        found.append(Variable("HF_HOME", f"{launch.cache}/huggingface", "launch.cache: models"))
        found.append(Variable("SHARDWISE_CACHE", f"{launch.cache}/shardwise", "launch.cache: prepared rows"))
    if launch.interface is not None:
        why = "the interface between the nodes, not the first that answers"
        name = "GLOO_SOCKET_IFNAME" if launch.gpus is None else "NCCL_SOCKET_IFNAME"
        found.append(Variable(name, launch.interface, why))
        if launch.gpus is not None:  # checkpoints are gathered over gloo
            found.append(Variable("GLOO_SOCKET_IFNAME", launch.interface, why))
    if launch.gpus is None:
        return tuple(found)
    found.append(Variable("TORCH_FR_BUFFER_SIZE", "2000", "keep the last collectives: who hung, and where"))
    found.append(Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and write them when one times out"))
    if launch.nodes == 1:
        return tuple(found)
    if launch.fabric in ("infiniband", "roce"):
        found.append(Variable("NCCL_NET", "IB", "fail without RDMA rather than fall back to TCP in silence"))
    elif launch.fabric == "efa":
        found.append(Variable("FI_PROVIDER", "efa", "libfabric would take TCP where EFA is missing"))
        found.append(Variable("NCCL_NET_PLUGIN", "ofi", "NCCL reaches EFA through the aws-ofi-nccl plugin"))
    elif launch.fabric == "ethernet":
        found.append(Variable("NCCL_IB_DISABLE", "1", "an RDMA card without a cable makes NCCL wait for it"))
    return tuple(found)
