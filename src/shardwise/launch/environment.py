"""Variables for the communication libraries, per fabric: only where a library cannot find out, each with its reason.

Inside a node nothing is set: NCCL finds NVLink and NVSwitch by itself, and a variable could only make it worse. For
RoCE nothing more is set than for InfiniBand: NCCL chooses the GID itself since 2.21 (NCCL_IB_GID_INDEX is -1 by
default), and service levels and traffic classes belong to a cluster, which hands them on through
launch.environment. None of the fabrics was at hand: these are the vendors' words, read on 2026-11-30.
"""

from dataclasses import dataclass

from shardwise.recipe import Recipe

NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
FLIGHT_RECORDER = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
GLOO = "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use"
OFI = "https://github.com/aws/aws-ofi-nccl"
SHARDWISE = "docs/launch.md"


@dataclass(frozen=True)
class Variable:
    """One line of a generated script: `export NAME=value  # reason`; `source` says where the reason is from."""

    name: str
    value: str
    reason: str
    source: str


def variables(recipe: Recipe) -> tuple[Variable, ...]:
    """What every node of a launched run gets beside the variables that a person hands on."""
    return (*_cache(recipe), *_interface(recipe), *_fabric(recipe))


def _cache(recipe: Recipe) -> list[Variable]:
    folder = recipe.launch.cache
    if folder is None:
        return []
    return [
        Variable("HF_HOME", f"{folder}/huggingface", "launch.cache: models", SHARDWISE),
        Variable("SHARDWISE_CACHE", f"{folder}/shardwise", "launch.cache: prepared rows", SHARDWISE),
    ]


def _interface(recipe: Recipe) -> list[Variable]:
    launch = recipe.launch
    if launch.interface is None:
        return []
    why = "launch.interface: between the nodes, not the first that answers"
    found = [Variable("GLOO_SOCKET_IFNAME", launch.interface, why, GLOO)]
    if launch.gpus is not None:  # gloo all the same: checkpoints are gathered over it
        exact = "the same for NCCL; = for this very name, or eth1 would take eth10 too"
        found.append(Variable("NCCL_SOCKET_IFNAME", f"={launch.interface}", exact, NCCL))
    return found


def _fabric(recipe: Recipe) -> list[Variable]:
    launch = recipe.launch
    if launch.gpus is None:
        return []
    found = [
        Variable("TORCH_FR_BUFFER_SIZE", "2000", "keep the last collectives: who hung, and where", FLIGHT_RECORDER),
        Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and write them when one times out", FLIGHT_RECORDER),
    ]  # fmt: skip
    if launch.nodes == 1:
        return found
    if launch.fabric in ("infiniband", "roce"):
        why = "fail without RDMA rather than fall back to TCP in silence"
        found.append(Variable("NCCL_NET", "IB", why, NCCL))
    elif launch.fabric == "efa":
        why = "fail without the EFA plugin rather than fall back to TCP in silence"
        found.append(Variable("NCCL_NET", "AWS Libfabric", why, OFI))
    elif launch.fabric == "ethernet":
        # Stronger than NCCL_IB_DISABLE, which external plugins do not read (NVIDIA/nccl-tests issue 373).
        why = "TCP on every node: where only some have an RDMA card NCCL may wait for ever"
        found.append(Variable("NCCL_NET", "Socket", why, "https://github.com/NVIDIA/nccl/issues/234"))
    return found
