"""A model on the Hugging Face hub: its config and safetensors headers; else the catalogue, said aloud."""

import json
import os
import re
import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from shardwise.errors import ModelError, nearest
from shardwise.facts.catalogue import catalogue_shape, known_models
from shardwise.facts.model import ModelShape, shape_from_config, with_note

_HUB_ID = re.compile(r"^[\w][\w.-]*(/[\w][\w.-]*)?$")
_TIMEOUT_SECONDS = "5"
_NOT_HERE = "no answer from huggingface.co, and no copy in its cache"


def read_hub_model(source: str, revision: str | None = None) -> ModelShape:
    """Fetch config.json and headers of a hub id; when the hub is not reachable, use the catalogue's record.

    Raises ModelError when neither knows the model.
    """
    if not _HUB_ID.match(source):
        raise ModelError(
            f"'{source}' is not a model", "it is no file or folder, and no hub id has this form",
            "a hub id looks like Qwen/Qwen3-8B",
        )  # fmt: skip
    known = catalogue_shape(source)
    try:
        return _fetch(source, revision)
    except _Unreachable as problem:
        if known is not None:
            return with_note(
                known, f"the hub is not reachable ({problem}): shape from the built-in catalogue"
            )
        close = nearest(source, known_models())
        raise ModelError(
            f"model '{source}' is neither a local folder, nor on the hub within reach, nor in the catalogue",
            str(problem),
            f"did you mean {' or '.join(close)}?"
            if close
            else "download the model and give its folder, or give its config.json",
        ) from None


class _Unreachable(Exception):
    pass


def _fetch(source: str, revision: str | None) -> ModelShape:
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", _TIMEOUT_SECONDS)
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", _TIMEOUT_SECONDS)
    from huggingface_hub import constants

    here_only = not answers(constants.ENDPOINT)
    if here_only and not os.path.isdir(f"{constants.HF_HUB_CACHE}/models--{source.replace('/', '--')}"):
        raise _Unreachable(_NOT_HERE)  # the client takes as much time to import as the rest of a plan
    from huggingface_hub import errors, get_safetensors_metadata, hf_hub_download

    try:
        path = hf_hub_download(source, "config.json", revision=revision, local_files_only=here_only)
    except errors.GatedRepoError:
        raise _Unreachable("the hub says the model is gated: log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise _Unreachable("the hub knows no such model, or it is private") from None
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as problem:
        if isinstance(problem, errors.LocalEntryNotFoundError):
            raise _Unreachable(_NOT_HERE) from None
        raise ModelError(
            f"'{source}' on the hub has no config.json{f' at {revision}' if revision else ''}",
            "it is not a transformers model (GGUF files, an adapter?)",
            "give the id of the original model",
        ) from None
    except (OSError, ValueError, errors.HfHubHTTPError) as problem:
        raise _Unreachable(type(problem).__name__) from None
    with open(path, encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    header: dict[str, Any] | None = None
    if here_only:
        return with_note(
            shape_from_config(config, source), "config.json from the hub's local cache; headers not looked at"
        )
    try:
        metadata = get_safetensors_metadata(source, revision=revision)
        header = {
            name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
            for part in metadata.files_metadata.values()
            for name, t in part.tensors.items()
        }
    except Exception as problem:  # headers are a second opinion: without them the config's count stands
        shape = shape_from_config(config, source)
        return with_note(shape, f"counts from config.json alone (headers: {type(problem).__name__})")
    return shape_from_config(config, source, header)


def answers(endpoint: str) -> bool:
    """Whether anything listens there, in one try: the client's own retries take half a minute offline.

    Behind a proxy this cannot be told, and the client finds out.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").casefold() in ("1", "true", "yes", "on"):
        return False
    if getproxies().get("https") or getproxies().get("all"):
        return True
    address = urlsplit(endpoint)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        with socket.create_connection((address.hostname or "", port), timeout=float(_TIMEOUT_SECONDS)):
            return True
    except OSError:
        return False
