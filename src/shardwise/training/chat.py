"""A conversation with a run's model on the terminal: `python -m shardwise.training.chat RUN_FOLDER LIMIT ...`."""

import sys
from pathlib import Path
from typing import Any

import torch

from shardwise.data import end_ids, load_tokenizer, render_prompt
from shardwise.errors import ShardwiseError
from shardwise.recipe import parse_recipe
from shardwise.runs import RunFolder
from shardwise.training.model import ModelFolder
from shardwise.training.samples import generate
from shardwise.training.terminal import keep_clean


def load(run: RunFolder, base: bool) -> tuple[Any, ModelFolder]:
    """The run's model (or its base), ready to generate, and the folder of its base."""
    recipe = parse_recipe(run.recipe_text(), str(run.recipe_path))
    folder = ModelFolder(Path(recipe.model.source), recipe)
    if not base and run.model_path.is_dir():
        folder = ModelFolder(run.model_path, recipe)
    model: Any = folder.load()
    if not base and run.adapter_path.is_dir():
        from shardwise.training.export.origin import with_adapter

        model = with_adapter(model, run.adapter_path, folder.path)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return model.eval(), folder


def answer(
    model: Any, folder: ModelFolder, tokenizer: Any, messages: list[dict[str, str]], limit: int
) -> str:
    """One greedy answer to a conversation, rendered as in training."""
    template = folder.recipe.model.chat_template
    ids = render_prompt(messages, tokenizer, template)
    return generate(
        model, tokenizer, ids, limit, end_ids(tokenizer, template), next(model.parameters()).device
    )


def main(arguments: list[str]) -> int:
    run, limit = RunFolder(Path(arguments[0])), int(arguments[1])
    once = arguments[arguments.index("--message") + 1] if "--message" in arguments else None
    keep_clean()
    try:
        model, folder = load(run, "--base" in arguments)
        tokenizer = load_tokenizer(folder.path)
        if once is not None:
            print(answer(model, folder, tokenizer, [{"role": "user", "content": once}], limit))
            return 0
        print("an empty line ends the conversation", file=sys.stderr)
        messages: list[dict[str, str]] = []
        while text := input("you: ").strip():
            messages.append({"role": "user", "content": text})
            said = answer(model, folder, tokenizer, messages, limit)
            messages.append({"role": "assistant", "content": said})
            print(f"model: {said}")
    except ShardwiseError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    except (EOFError, KeyboardInterrupt):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
