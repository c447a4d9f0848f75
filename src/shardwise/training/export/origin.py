"""Which base an adapter belongs to: recorded beside it, checked when it is put on a model."""

import re
from pathlib import Path
from typing import Any

from shardwise.errors import ModelError
from shardwise.facts.versions import installed_versions
from shardwise.facts.weights import weights_digest
from shardwise.runs.jsonfile import read_json, write_json
from shardwise.training.model import ModelFolder

ORIGIN = "shardwise.json"
_CACHED = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<revision>[0-9a-f]+)$")


def origin_of(folder: ModelFolder) -> dict[str, Any]:
    """Id, revision and weight hash of a base, and the versions that trained on it.

    The id of a model out of the hub's cache is its hub id; of another folder, the folder's name: an absolute
    path means nothing on the next machine.
    """
    path = folder.path.resolve()
    cached = _CACHED.search(str(path))
    return {
        "base": {
            "id": cached["id"].replace("--", "/", 1) if cached else path.name,
            "revision": cached["revision"] if cached else folder.recipe.model.revision,
            "weights": weights_digest(path),
        },
        "method": folder.recipe.method,
        "versions": installed_versions(),
    }


def write_origin(target: Path, folder: ModelFolder) -> None:
    write_json(target / ORIGIN, origin_of(folder))


def check_base(adapter: Path, base: Path) -> None:
    """Raise ModelError when `base` is not the model that the adapter was trained on.

    An adapter without a record (from another program) passes: there is nothing to compare with.
    """
    recorded = (read_json(adapter / ORIGIN) or {}).get("base", {})
    found = weights_digest(base)
    if recorded.get("weights") in (None, "none", found):
        return
    raise ModelError(
        f"adapter '{adapter}' was trained on other weights than those in '{base}'",
        f"it belongs to {recorded.get('id')} (weight hash {recorded['weights']}), this base has {found}",
        "give the folder of the base it was trained on",
    )


def with_adapter(model: Any, adapter: Path, base: Path) -> Any:
    """`model`, loaded from `base`, with the adapter on it; only safetensors are read.

    Raises ModelError for another base, or an adapter that is not safetensors.
    """
    from peft import PeftModel

    check_base(adapter, base)
    if not (adapter / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"'{adapter}' has no adapter_model.safetensors",
            "other formats are pickles, which run code when they are read; they are never opened",
            "convert it with the program that wrote it",
        )
    return PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
