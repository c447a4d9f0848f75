"""The tokenizer side of a model: which folder, which files, text -> ids with character positions."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import DataError, MissingDependencyError, ModelError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
)
_STAND_IN = 0xF0000  # private use plane: stands for control tokens while text is tokenized


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """What preparation needs of a tokenizer; `full` is transformers' own object."""

    full: Any
    name: str

    @cached_property
    def backend(self) -> Any:
        """The Rust tokenizer, with character positions that include white space."""
        from tokenizers import Tokenizer as Backend

        backend = self.full.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        text = backend.to_str()
        if '"trim_offsets":true' in text.replace(" ", ""):
            backend = Backend.from_str(json.dumps(_untrimmed(json.loads(text))))
        return backend

    @cached_property
    def control(self) -> dict[str, int]:
        """Text -> id of the tokens that steer the model (marked special), longest text first."""
        found = {str(t): i for i, t in self.full.added_tokens_decoder.items() if t.special}
        for text in self.full.all_special_tokens:
            found.setdefault(str(text), int(self.full.convert_tokens_to_ids(text)))
        return dict(sorted(found.items(), key=lambda item: -len(item[0])))

    @property
    def end(self) -> int | None:
        """Id of the end token (eos)."""
        return None if self.full.eos_token_id is None else int(self.full.eos_token_id)

    @property
    def end_text(self) -> str:
        return "" if self.full.eos_token is None else str(self.full.eos_token)

    @property
    def template(self) -> str | None:
        """The model's own chat template; of several, the one named default."""
        found = self.full.chat_template
        if isinstance(found, dict):
            found = found.get("default") or next(iter(found.values()), None)
        return found

    @cached_property
    def variables(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as templates expect them."""
        return {
            key: str(value) for key, value in self.full.special_tokens_map.items() if isinstance(value, str)
        }

    @cached_property
    def splits(self) -> bool:
        """Whether two texts tokenized apart give the same as one (no space is put before the first word)."""
        whole = self.encode(["a\nb"], special=False)[0].ids
        apart = [i for part in self.encode(["a\n", "b"], special=False) for i in part.ids]
        return bool(whole == apart)

    @cached_property
    def _guarded(self) -> tuple[Any, dict[int, int], dict[str, str]]:
        """A copy that knows control tokens by stand-in characters only, its ids -> ours, text -> stand-in.

        In that copy the text `<|im_end|>` is text like any other.
        """
        from tokenizers import Tokenizer as Backend

        tree = json.loads(self.backend.to_str())
        stand_in = {text: chr(_STAND_IN + i) for i, text in enumerate(self.control)}
        for token in tree.get("added_tokens", []):
            if token["content"] in stand_in:
                token.update(content=stand_in[token["content"]], normalized=False)
        copy = Backend.from_str(json.dumps(_without_names(tree, stand_in)))
        missing = [c for c in stand_in.values() if copy.token_to_id(c) is None]
        if missing:
            copy.add_special_tokens(missing)
        back: dict[int, int] = {}
        for control, char in stand_in.items():
            made = copy.token_to_id(char)
            if made is not None:
                back[made] = self.control[control]
        return copy, back, stand_in

    def encode(self, texts: Sequence[str], special: bool) -> list[Any]:
        """tokenizers.Encoding of each text; `special`: with the tokens the tokenizer adds by itself (bos)."""
        found: list[Any] = self.backend.encode_batch(list(texts), add_special_tokens=special)
        return found

    def guard(self, text: str, quoted: dict[str, str]) -> str:
        """`text` for `encode_guarded`: its control-token text is meant and gets stand-ins; the keys of `quoted`
        are stand-ins for control-token text that is not meant, and become that text."""
        for control, char in self._guarded[2].items():
            text = text.replace(control, char)
        for char, control in quoted.items():
            text = text.replace(char, control)
        return text

    def encode_guarded(self, text: str, special: bool, meant: bool) -> tuple[np.ndarray, Any]:
        """Ids (T,) and Encoding of a text in which only stand-ins (from `guard`) are control tokens.

        `meant`: whether there may be any. Raises DataError when other text still came out as a control token.
        """
        copy, back, stand_in = self._guarded
        expected = sum(text.count(char) for char in stand_in.values()) if meant else 0
        encoding = copy.encode(text, add_special_tokens=special)
        ids = np.array([back.get(i, i) for i in encoding.ids], dtype=np.int32)
        control_ids = set(self.control.values())
        got = sum(
            i in control_ids and b > a for i, (a, b) in zip(ids.tolist(), encoding.offsets, strict=True)
        )
        if got > expected:
            raise DataError("control-token text", "this tokenizer cannot write it as plain text")
        return ids, encoding

    def text_of(self, ids: Sequence[int]) -> str:
        found: str = self.full.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return found


def _without_names(tree: Any, stand_in: dict[str, str]) -> Any:
    """Post-processors name special tokens by text; rename them there too."""
    post = tree.get("post_processor")
    if post:
        text = json.dumps(post, ensure_ascii=False)
        for name, char in stand_in.items():
            text = text.replace(json.dumps(name, ensure_ascii=False), json.dumps(char, ensure_ascii=False))
        tree["post_processor"] = json.loads(text)
    return tree


def _untrimmed(node: Any) -> Any:
    """A tokenizer's tree with `trim_offsets` off: positions of a token then include its white space."""
    if isinstance(node, dict):
        if "vocab" in node and "type" in node:  # the model: large, nothing to find
            return node
        return {k: False if k == "trim_offsets" else _untrimmed(v) for k, v in node.items()}
    return [_untrimmed(v) for v in node] if isinstance(node, list) else node


def tokenizer_folder(model: str | Path, revision: str | None = None) -> Path:
    """The local folder with a model's tokenizer files; of a hub id, fetched (tokenizer files only).

    Raises ModelError.
    """
    folder = Path(model)
    if folder.is_file():
        folder = folder.parent
    if folder.is_dir():
        if not any((folder / name).exists() for name in FILES):
            raise ModelError(
                f"model folder '{folder}' has no tokenizer",
                f"none of {', '.join(FILES[:3])}, tokenizer.model is there",
                "copy the tokenizer files of the base model into it",
            )
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(
                str(model), revision=revision, allow_patterns=[*FILES, "config.json", "*.tiktoken"]
            )
        )
    except (OSError, ValueError, HFValidationError) as problem:
        raise ModelError(
            f"no tokenizer for '{model}'",
            f"it is no local folder, and the hub gave: {str(problem).splitlines()[0]}",
            "give a folder that exists, or check the hub id and the connection",
        ) from None


def load_tokenizer(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer of a model folder or hub id. Raises ModelError, MissingDependencyError."""
    folder = tokenizer_folder(model, revision)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingDependencyError(
            "tokenizing needs transformers", "it is not installed", "pip install 'shardwise[data]'"
        ) from None
    try:
        full = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as problem:  # whatever a broken folder makes transformers raise
        first = (str(problem).splitlines() or [""])[0]
        raise ModelError(
            f"the tokenizer in '{folder}' cannot be loaded",
            f"{type(problem).__name__}: {first}",
            "check that tokenizer.json is complete",
        ) from None
    if not getattr(full, "is_fast", False):
        raise ModelError(
            f"the tokenizer in '{folder}' has no tokenizer.json",
            "character positions, which labels need, come with the fast kind only",
            "convert it once with transformers and save it into the folder",
        )
    return Tokenizer(full, str(model))


def shared_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """As `load_tokenizer`, once per process while the files stay the same. Not to be changed by its users."""
    return _shared(str(folder), fingerprint(folder), trust_remote_code)


@lru_cache(maxsize=2)
def _shared(folder: str, _: str, trust_remote_code: bool) -> Tokenizer:
    return load_tokenizer(folder, trust_remote_code=trust_remote_code)


def fingerprint(folder: Path) -> str:
    """Hash of everything in a folder that changes tokens, and of the versions that read it."""
    found = hashlib.blake2b(digest_size=16)
    more = sorted(p.name for pattern in ("*.tiktoken", "*.py") for p in folder.glob(pattern))
    for name in (*FILES, "config.json", *more):  # config.json says which kind of tokenizer it is
        path = folder / name
        if path.is_file():
            found.update(f"{name} {path.stat().st_size}\n".encode())
            found.update(path.read_bytes())
    for package in ("transformers", "tokenizers", "jinja2"):
        try:
            found.update(f"{package} {metadata.version(package)}\n".encode())
        except metadata.PackageNotFoundError:
            found.update(f"{package} missing\n".encode())
    return found.hexdigest()
