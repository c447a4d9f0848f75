"""What usually goes wrong in silence, looked for in a run's first two steps."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.errors import RunError
from shardwise.recipe.schema import Recipe
from shardwise.training.engines.protocol import Engine, trained


def starting_loss(loss: float, vocabulary: int) -> str | None:
    """A warning when a model knows no more than a fair die over its vocabulary: its weights were not loaded.

    Pretrained models start far below ln(vocabulary) even on text of another language.
    """
    if loss < 0.95 * math.log(vocabulary):
        return None
    return (
        f"the loss starts at {loss:.2f}, and guessing among {vocabulary:,} tokens gives ln({vocabulary}) = "
        f"{math.log(vocabulary):.2f}: this model's weights look untrained or not loaded"
    )


class GradientWatch:
    """Notes which trained tensors have had a gradient that is not zero, on any rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.named = trained(engine.module.model)
        self.seen: set[str] = set()
        self.handles: list[Any] = []
        for name, param in self.named:
            self.handles.append(param.register_hook(self._note(name)))
            if isinstance(param, DTensor):  # FSDP2's backward pass goes by gathered copies
                self.handles.append(param.register_post_accumulate_grad_hook(self._note_kept(name)))

    def _note(self, name: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            if name not in self.seen and bool(grad.count_nonzero()):
                self.seen.add(name)

        return hook

    def _note_kept(self, name: str) -> Any:
        def hook(param: torch.Tensor) -> None:
            self.look(name, param)

        return hook

    def look(self, name: str, param: torch.Tensor) -> None:
        """Note a gradient that an engine left on its parameter."""
        grad = param.grad
        if grad is None or name in self.seen:
            return
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if bool(local.count_nonzero()):
            self.seen.add(name)

    def after_backward(self) -> None:
        """To be called between the last backward pass of a step and its update."""
        for name, param in self.named:
            self.look(name, param)

    def finish(self) -> list[str]:
        """Stop watching. Names of trained tensors without any gradient, the same on all ranks (collective)."""
        for handle in self.handles:
            handle.remove()
        flags = torch.tensor([float(name in self.seen) for name, _ in self.named], device=self.engine.device)
        if self.engine.ranks.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [name for (name, _), flag in zip(self.named, flags.tolist(), strict=True) if not flag]


class FirstSteps:
    """All of this module's checks, in the order a run meets them; nothing after the second step.

    Raises RunError when the live engine is not what the recipe asked for, or ranks hold the same rows. The rest
    is told, not refused: a model may be untrained on purpose, and an expert may have seen no token yet.
    """

    def __init__(self, engine: Engine, recipe: Recipe) -> None:
        self.engine = engine
        self.steps = 0
        self.watch: GradientWatch | None = GradientWatch(engine)
        wrong = compare_facts(live_facts(engine), recipe, engine.ranks.world_size)
        if wrong:
            raise RunError(
                "what is live is not what the recipe asks for",
                "; ".join(wrong),
                "please report this with the recipe and the versions that shardwise doctor prints",
            )

    def before_update(self, batches: Sequence[Any]) -> None:
        """Between a step's last backward pass and its update."""
        if self.steps == 0:
            ranks_differ(batches, self.engine)
        if self.watch is not None:
            self.watch.after_backward()

    def after_update(self, loss: float) -> list[str]:
        """What a person should know about the step that just ended (collective in the second one)."""
        self.steps += 1
        told = []
        if self.steps == 1:
            vocabulary = self.engine.module.causal_lm.config.get_text_config().vocab_size
            told += [text for text in [starting_loss(loss, vocabulary)] if text]
        if self.steps == 2 and self.watch is not None:
            silent, count = self.watch.finish(), len(self.watch.named)
            self.watch = None
            if silent:
                told.append(
                    f"{len(silent)} of {count} trained tensors had no gradient in the first two steps, first: "
                    f"{silent[0]}; what is not reached by the loss does not learn"
                )
        return told


def watch_gradients(engine: Engine) -> GradientWatch:
    """Start watching; two steps are needed, since LoRA's first matrix gets none while the second is zero."""
    return GradientWatch(engine)


def live(engine: Engine) -> dict[str, Any]:
    """What is really live, for the run's first record: the engine's facts, and which kernels are in the model.

    `kernels`: {"counts": modules with a kernel by class, "skipped": class -> why it was left alone}.
    """
    return {"engine": live_facts(engine), "kernels": asdict(engine.module.kernels)}


def live_facts(engine: Engine) -> dict[str, Any]:
    """The engine's facts, and how the model under it is quantised: "none", or type, nesting and layers."""
    found = {
        f"{state.quant_type}, {'double' if state.nested else 'single'}"
        for module in engine.module.modules()
        if (state := _quant_state(module)) is not None
    }
    return {**engine.facts(), "quantisation": " and ".join(sorted(found)) or "none"}


def _quant_state(module: torch.nn.Module) -> Any:
    """bitsandbytes' constants of a 4-bit layer; under FSDP2 they lie beside the weight, not on it."""
    weight = module._parameters.get("weight")
    return getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)


def kernels_told(kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for a log: "kernels in 61 LlamaRMSNorm, 30 LlamaMLP; left alone: Linear (why)"."""
    put = ", ".join(f"{count} {name}" for name, count in sorted(kernels["counts"].items()))
    left = "; ".join(f"{name} ({why})" for name, why in sorted(kernels["skipped"].items()))
    return f"kernels in {put or 'no module'}" + (f"; left alone: {left}" if left else "")


# What must really be there; FSDP2 puts its prefix before the class that it wraps in place.
_CLASSES = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP", "deepspeed": "DeepSpeedEngine"}
_PREFIXES = ("device", "engine_class")


def compare_facts(facts: Mapping[str, Any], recipe: Recipe, world_size: int) -> list[str]:
    """What the live engine is, where it differs from what the recipe asked for."""
    asked: dict[str, Any] = {"engine": recipe.engine.name, "world_size": world_size, "quantisation": "none"}
    if recipe.method == "qlora":
        double = "double" if recipe.quantization.double_quantization else "single"
        asked["quantisation"] = f"{recipe.quantization.type}, {double}"
    if recipe.engine.name != "single":
        asked["engine_class"] = _CLASSES[recipe.engine.name]
    if recipe.engine.device != "auto":
        asked["device"] = recipe.engine.device
    precision = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[recipe.training.precision]
    if recipe.engine.name == "fsdp2":
        section = recipe.engine.fsdp2
        asked |= {
            "reshard_after_forward": section.reshard_after_forward,
            "cpu_offload": section.cpu_offload,
            "sharded": True,
        }
    else:
        asked["weights_dtype"] = precision
    if recipe.engine.name == "deepspeed":
        zero = recipe.engine.deepspeed
        asked |= {
            "zero_stage": zero.zero_stage,
            "offload_optimizer": zero.offload_optimizer,
            "offload_parameters": zero.offload_parameters,
            "gradient_clipping": recipe.optimizer.max_grad_norm or 0.0,
        }
    asked["optimizer_dtype"] = "torch.float32" if recipe.optimizer.master_weights else precision
    return [
        f"{key}: asked {value}, found {facts.get(key)}"
        for key, value in asked.items()
        if not (str(facts.get(key)).startswith(str(value)) if key in _PREFIXES else facts.get(key) == value)
    ]


def ranks_differ(batches: Sequence[Any], engine: Engine) -> None:
    """Raise RunError when two ranks were given the same rows: the run would be one rank's, at N times the price."""
    if engine.ranks.world_size == 1:
        return
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.input_ids.cpu().numpy().tobytes())
    mine = int.from_bytes(digest.digest()[:7], "big")
    found: list[int] = [0] * engine.ranks.world_size
    dist.all_gather_object(found, mine if any(b.trained_tokens for b in batches) else -engine.ranks.rank - 1)
    if len(set(found)) < len(found):
        raise RunError(
            f"{len(found) - len(set(found)) + 1} of {len(found)} ranks hold the same rows in the first step",
            "each rank must train on its own share",
            "please report this with the recipe; the data may also consist of equal rows",
        )
