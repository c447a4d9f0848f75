"""A model card out of a run's own record: nothing in it is from memory."""

from pathlib import Path
from typing import Any

from shardwise.recipe import Recipe
from shardwise.runs import RunFolder


def card(run: RunFolder, recipe: Recipe, origin: dict[str, Any], what: str, note: str) -> str:
    """README.md of an export. `note` says how it was compared with the trained model."""
    base, summary = origin["base"], run.summary()
    held = (summary.evaluation_before, summary.evaluation_after) if summary else (None, None)
    rows = [
        ("base", f"{base['id']}" + (f" at {base['revision']}" if base["revision"] else "")),
        ("base weight hash", base["weights"]),
        ("method", recipe.method + (f", rank {recipe.lora.rank}" if recipe.method != "full" else "")),
        ("data", ", ".join(Path(s.path).name for s in recipe.data.train)),
        ("trained on", "assistant turns" if recipe.data.train_on == "assistant" else "all tokens"),
        ("sequence length", recipe.data.sequence_length),
        ("global batch size", recipe.training.global_batch_size),
        ("optimizer", f"{recipe.optimizer.name}, learning rate {recipe.optimizer.learning_rate}"),
        ("steps", summary.steps if summary else None),
        ("held-out loss before and after", " -> ".join(f"{x:.4f}" for x in held if x is not None) or None),
        ("seed", recipe.training.seed),
        ("versions", ", ".join(f"{k} {v}" for k, v in origin["versions"].items())),
        ("checked", note),
    ]
    head = "---\nlibrary_name: " + ("peft" if what == "adapter" else "transformers") + "\n"
    if "/" in base["id"]:
        head += f"base_model: {base['id']}\n"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    return (
        f"{head}tags: [shardwise]\n---\n\n# {run.name}\n\nFine-tuned with shardwise; this folder holds the "
        f"{what}.\n\n| | |\n|---|---|\n{table}\n"
    )
