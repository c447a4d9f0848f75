"""What a device can do."""

from collections.abc import Iterator

from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules.problem import Problem, Situation

BNB_OPTIMIZERS = "https://huggingface.co/docs/bitsandbytes/main/en/optimizers"


def paged_states_need_cuda(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """Paging is CUDA's unified memory; elsewhere there is nothing to page from."""
    device = where.device_of(recipe)
    if recipe.optimizer.name == "paged_adamw_8bit" and device in ("cpu", "mps"):
        yield Problem(
            "paged_states_need_cuda",
            "optimizer.name",
            f"optimizer.name: paged_adamw_8bit on {device}",
            "pages move between GPU and host memory; there is no GPU memory here to leave",
            "use optimizer.name: adamw_8bit" if device == "cpu" else "use optimizer.name: adamw",
            BNB_OPTIMIZERS,
        )


def bitsandbytes_has_no_mps(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """Its kernels exist for CUDA, ROCm, XPU and CPU."""
    if where.device_of(recipe) != "mps":
        return
    link = "https://huggingface.co/docs/bitsandbytes/main/en/installation"
    if recipe.method == "qlora":
        yield Problem(
            "bitsandbytes_has_no_mps",
            "method",
            "method: qlora on mps",
            "bitsandbytes has no 4-bit kernels for Apple GPUs",
            "use method: lora, or engine.device: cpu",
            link,
        )
    if recipe.optimizer.name == "adamw_8bit":
        yield Problem(
            "bitsandbytes_has_no_mps",
            "optimizer.name",
            "optimizer.name: adamw_8bit on mps",
            "bitsandbytes has no 8-bit optimizers for Apple GPUs",
            "use optimizer.name: adamw",
            link,
        )


def attention_kernels_need_cuda(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """FlashAttention is CUDA code; FlexAttention has no backward pass on CPUs."""
    kind, device = recipe.model.attention, where.device_of(recipe)
    if kind in ("flash_attention_2", "flex_attention") and device in ("cpu", "mps"):
        flash = kind == "flash_attention_2"
        yield Problem(
            "attention_kernels_need_cuda",
            "model.attention",
            f"model.attention: {kind} on {device}",
            "its kernels are CUDA code" if flash else "it has no backward pass on this device",
            "use model.attention: sdpa, which keeps packed rows apart as well",
            "https://github.com/Dao-AILab/flash-attention"
            if flash
            else "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html",
        )


def flash_attention_is_for_16_bits(recipe: Recipe, _: ModelShape | None, __: Situation) -> Iterator[Problem]:
    """Its kernels take fp16 and bf16 only."""
    if recipe.model.attention == "flash_attention_2" and recipe.training.precision == "fp32":
        yield Problem(
            "flash_attention_is_for_16_bits",
            "training.precision",
            "model.attention: flash_attention_2 with training.precision: fp32",
            "its kernels take 16-bit inputs only",
            "use training.precision: bf16, or model.attention: sdpa",
            "https://github.com/Dao-AILab/flash-attention",
        )


def ranks_have_a_device_each(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """NCCL refuses two ranks on one GPU; an Apple machine has one."""
    processes, device = recipe.engine.processes, where.device_of(recipe)
    if not isinstance(processes, int):
        return
    limit = {"cuda": where.gpus, "mps": 1}.get(device or "")
    if limit is not None and processes > limit:
        yield Problem(
            "ranks_have_a_device_each",
            "engine.processes",
            f"engine.processes: {processes} on a machine with {limit} GPU{'s' if limit != 1 else ''}",
            "two ranks on one GPU only share its memory, and NCCL refuses them",
            f"use engine.processes: {max(1, limit)}" if limit else "use engine.device: cpu",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
        )


def sharding_needs_a_backend(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """torch.distributed has no backend for Apple GPUs."""
    name = recipe.engine.name
    if where.device_of(recipe) == "mps" and name in ("ddp", "fsdp2", "deepspeed"):
        yield Problem(
            "sharding_needs_a_backend",
            "engine.name",
            f"engine.name: {name} on mps",
            "torch.distributed has no backend for Apple GPUs",
            "use engine.name: single, or engine.device: cpu",
            "https://docs.pytorch.org/docs/stable/distributed.html",
        )


def bf16_needs_ampere(recipe: Recipe, _: ModelShape | None, where: Situation) -> Iterator[Problem]:
    """Volta and Turing emulate bf16, several times slower than fp32."""
    capability = where.gpu_capability
    if where.device_of(recipe) != "cuda" or recipe.training.precision != "bf16" or capability is None:
        return
    if int(capability.split(".")[0]) < 8:
        yield Problem(
            "bf16_needs_ampere",
            "training.precision",
            f"training.precision: bf16 on a GPU of compute capability {capability}",
            "hardware bf16 begins with capability 8.0 (Ampere)",
            "use training.precision: fp32",
            "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
        )


RULES = (
    paged_states_need_cuda,
    bitsandbytes_has_no_mps,
    attention_kernels_need_cuda,
    flash_attention_is_for_16_bits,
    ranks_have_a_device_each,
    sharding_needs_a_backend,
    bf16_needs_ampere,
)
