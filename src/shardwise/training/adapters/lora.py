"""LoRA adapters on a model's linear layers."""

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from shardwise.errors import RecipeError, nearest
from shardwise.facts.shape import ATTENTION_MODULES, READ_AS_EXPERTS
from shardwise.recipe.schema import Lora
from shardwise.training.optimizers import is_matrix


def adapt(model: nn.Module, lora: Lora, seed: int) -> PeftModel:
    """Freeze `model` and put adapters on it, in the base's dtype, the same for the same seed.

    Raises RecipeError when `lora.targets` names no layer of this model.
    """
    import torch

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Adapters stay in the base's dtype; their fp32 masters live in the optimizer.
        return get_peft_model(model, config, autocast_adapter_dtype=False)


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    """Full names of the layers to adapt. Vision towers and output heads are left alone."""
    head = model.get_output_embeddings()
    linear = {
        name
        for name, module in model.named_modules()
        if is_matrix(module) and module is not head and not _is_tower(name)
    }
    wanted = lora.targets
    mixed = _experts_in_one_tensor(model)
    if wanted == "all-linear":
        return sorted(n for n in linear if not (mixed and n.rsplit(".", 1)[-1] in READ_AS_EXPERTS))
    suffixes = ATTENTION_MODULES if wanted == "attention" else tuple(wanted)
    chosen = sorted(n for n in linear if any(n == s or n.endswith("." + s) for s in suffixes))
    known = sorted({n.rsplit(".", 1)[-1] for n in linear})
    missing = [s for s in suffixes if not any(n == s or n.endswith("." + s) for n in linear)]
    if not chosen or (wanted != "attention" and missing):
        close = nearest(str(missing[0]), known) if missing else []
        raise RecipeError(
            f"lora.targets: no linear layer is called {', '.join(map(repr, missing))}",
            f"this model's linear layers are: {', '.join(known)}",
            f"did you mean {close[0]}?" if close else "use lora.targets: all-linear",
        )
    taken = sorted({n.rsplit(".", 1)[-1] for n in chosen} & set(READ_AS_EXPERTS)) if mixed else []
    if taken:
        raise RecipeError(
            f"lora.targets: {', '.join(taken)} of a mixture of experts",
            "PEFT takes these names for the experts', and would train adapters on every expert instead",
            "use lora.targets: attention, or all-linear, which leaves them out",
        )
    return chosen


def _experts_in_one_tensor(model: nn.Module) -> bool:
    return any(n.endswith("gate_up_proj") and p.dim() == 3 for n, p in model.named_parameters())


def _is_tower(name: str) -> bool:
    return any(part in name for part in ("vision_tower", "vision_model", "visual.", "audio_tower"))
