"""A model's files on this disk: a local folder as it is, a hub id through huggingface_hub's cache."""

from pathlib import Path

from shardwise.errors import ModelError

# Never pickles: weights come as safetensors.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def local_folder(source: str, revision: str | None = None) -> Path:
    """The folder with config, tokenizer and weights of `source`; downloads a hub id once.

    Raises ModelError when it is neither a folder nor reachable, or has no config or weights.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        path = _fetch(source, revision)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"model folder '{path}' has no config.json",
            "the file that says what kind of model it is is missing",
            "point model.source at the folder that holds config.json and *.safetensors",
        )
    if not any(path.glob("*.safetensors")):
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise ModelError(
            f"model folder '{path}' has no weights in safetensors",
            f"found only {', '.join(others)}" if others else "found no weights at all",
            "pickled weights can run code and are not loaded: convert them with transformers' save_pretrained"
            if others
            else "to plan without weights use: shardwise plan",
        )
    return path


def _fetch(source: str, revision: str | None) -> Path:
    if Path(source).is_file() or source.startswith((".", "/", "~")):
        raise ModelError(
            f"model '{source}' is not a folder", "training needs config, tokenizer and weights",
            "give the folder that holds them, or a hub id",
        )  # fmt: skip
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError, HFValidationError) as problem:
        raise ModelError(
            f"model '{source}' cannot be had",
            f"it is no local folder, and the hub gave: {(str(problem).splitlines() or [''])[0]}",
            "check the name and the connection; gated models need: hf auth login",
        ) from None
