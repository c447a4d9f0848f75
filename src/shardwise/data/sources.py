"""What a recipe's `path` means: a file, a folder, a glob, or a hub dataset id -> the files, in a fixed order."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shardwise.errors import DataError, nearest

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
PACKED = (".gz", ".bz2", ".xz")
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
_NAME = r"([A-Za-z0-9][\w.-]*/[\w.-]+)"
_HUB = re.compile(rf"^(?:hf://datasets/)?{_NAME}(?:@([\w./-]+))?(?::([\w-]+))?$")
_INSIDE = re.compile(rf"^hf://datasets/{_NAME}(?:@([\w.-]+))?/(.+)$")  # a file, folder or glob of a dataset


@dataclass(frozen=True)
class Remote:
    """A file of a hub dataset that is read as it is needed and never kept: what readers use of a Path."""

    address: str  # datasets/ORG/NAME@COMMIT/PATH
    size: int

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.address).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.address).suffix

    def open(self, _: str = "rb") -> IO[bytes]:
        from huggingface_hub import HfFileSystem

        opened: IO[bytes] = HfFileSystem().open(self.address, "rb")
        return opened


@dataclass(frozen=True)
class DataFile:
    path: Path | Remote
    kind: str
    name: str  # as the person wrote it, or relative to the folder they named

    @property
    def size_bytes(self) -> int:
        return self.path.size if isinstance(self.path, Remote) else self.path.stat().st_size


def kind_of(path: Path | PurePosixPath) -> str | None:
    """jsonl, json, csv, parquet, arrow or text, by the name; None for anything else."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        suffix = Path(path.stem).suffix.lower()
    return KINDS.get(suffix)


def find_files(path: str, fetch: bool = True) -> tuple[list[DataFile], list[str]]:
    """(files, names of files passed over because their kind is unknown). Raises DataError.

    `fetch`: files of a hub dataset are downloaded; otherwise they are Remote.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return [DataFile(place, _kind_or_error(place), path)], []
    if place.is_dir():
        return _folder(place, path)
    if glob.has_magic(path) and not path.startswith("hf://"):
        found = sorted(Path(p) for p in glob.glob(str(place), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(
                f"no file matches '{path}'", "the pattern finds nothing", "check it with: ls " + path
            )
        return [DataFile(p, _kind_or_error(p), str(p)) for p in found], []
    inside = _INSIDE.match(path)
    if inside:
        return _hub(Dataset(inside[1], inside[2], within=inside[3]), fetch)
    hub = _HUB.match(path)
    if hub and kind_of(place) is None and not place.parent.is_dir():
        return _hub(Dataset(hub[1], hub[2], hub[3]), fetch)
    folder = place.parent
    if not folder.is_dir():
        raise DataError(
            f"data file '{path}' does not exist", f"there is no folder '{folder}'", "check the path"
        )
    close = nearest(place.name, [p.name for p in folder.iterdir() if kind_of(p) or p.is_dir()])
    raise DataError(
        f"data file '{path}' does not exist",
        f"'{folder}' has no such file",
        f"did you mean {folder / close[0]}?" if close else "check the path",
    )


def _kind_or_error(path: Path) -> str:
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"'{path}' is of no known kind",
            f"known endings are {', '.join(KINDS)}, each also with {', '.join(PACKED)}",
            "rename it, or convert it to JSONL",
        )
    return kind


def _split_of(name: str) -> str:
    """`train`, `held out`, or nothing, by the word that a file's name begins with."""
    first = re.match("[a-z]*", name.lower())
    word = first[0] if first else ""
    if word in ("test", "validation", "valid", "val", "dev", "eval"):
        return "held out"
    return "train" if word in ("train", "training") else ""


def _folder(place: Path, name: str) -> tuple[list[DataFile], list[str]]:
    found, passed = [], []
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        if not path.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        kind = kind_of(path)
        if kind is None or path.name in _NO_DATA:
            passed.append(str(inside))
        else:
            found.append(DataFile(path, kind, str(Path(name) / inside)))
    splits = [_split_of(file.path.name) for file in found]
    if (
        "train" in splits
    ):  # a folder as datasets are given out: its other splits are for measuring, not for training
        passed += [f.name for f, split in zip(found, splits, strict=True) if split == "held out"]
        found = [f for f, split in zip(found, splits, strict=True) if split != "held out"]
    if not found:
        raise DataError(
            f"folder '{name}' holds no data",
            f"no file in it ends in {', '.join(KINDS)}"
            + (f"; it holds {', '.join(passed[:5])}" if passed else ""),
            "name the folder with the data files",
        )
    return found, passed


@dataclass(frozen=True)
class Dataset:
    """What is asked of a hub dataset: one split (train unless named), or what lies `within` it."""

    identity: str
    revision: str | None = None
    split: str | None = None
    within: str | None = None

    def takes(self, name: str) -> bool:
        """Whether a file of it, by its path inside the dataset, is asked for by that path or by its split."""
        if self.within is not None:
            folder = self.within.rstrip("/")
            return fnmatch(name, self.within) or name.startswith(f"{folder}/")
        wanted = re.escape(self.split or "train")
        return re.search(rf"(^|[^a-z]){wanted}([^a-z]|$)", name.lower()) is not None


def _hub(asked: Dataset, fetch: bool) -> tuple[list[DataFile], list[str]]:
    """The data files of a dataset on the hub."""
    try:
        found, passed = _listed(asked)
        if fetch:
            found, passed = _fetched(asked, [f.path for f in found if isinstance(f.path, Remote)], passed)
    except Exception as problem:  # whatever the network makes the libraries raise
        try:
            found, passed = _cached(asked)
        except Exception:
            raise _no_dataset(asked.identity, problem) from None
    return found, passed


def _chosen(asked: Dataset, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names of data files that are asked for, the others). Without a split in any name, all of them."""
    known = [n for n in names if kind_of(PurePosixPath(n)) and not n.endswith(".md")]
    known = [n for n in known if PurePosixPath(n).name not in _NO_DATA]
    chosen = [n for n in known if asked.takes(n)]
    if not chosen and (asked.split or asked.within):
        what = f"split '{asked.split}'" if asked.split else f"file '{asked.within}'"
        raise DataError(
            f"dataset '{asked.identity}' has no {what}",
            f"its files are {', '.join(known[:8])}",
            "name another",
        )
    chosen = chosen or known
    if not chosen:
        raise DataError(
            f"dataset '{asked.identity}' holds no data that is read here",
            f"no file of it ends in {', '.join(KINDS)}; it holds {', '.join(names[:5])}",
            "name another, or convert it to JSONL",
        )
    return sorted(chosen), [n for n in names if n not in chosen]


def _listed(asked: Dataset) -> tuple[list[DataFile], list[str]]:
    """The files, without a byte of their contents; all of one commit, so that a run sees one state."""
    from huggingface_hub import HfApi

    api = HfApi()
    commit = api.dataset_info(asked.identity, revision=asked.revision).sha
    tree = api.list_repo_tree(asked.identity, repo_type="dataset", revision=commit, recursive=True)
    sizes = {item.path: int(item.size) for item in tree if hasattr(item, "size")}
    shown = [n for n in sizes if not any(part.startswith(".") for part in PurePosixPath(n).parts)]
    names, passed = _chosen(asked, shown)
    start = f"datasets/{asked.identity}@{commit}"
    return [
        DataFile(Remote(f"{start}/{n}", sizes[n]), kind_of(PurePosixPath(n)) or "", f"{asked.identity}/{n}")
        for n in names
    ], passed


def _fetched(asked: Dataset, remote: Sequence[Remote], passed: list[str]) -> tuple[list[DataFile], list[str]]:
    from huggingface_hub import snapshot_download

    names = [r.address.split("@", 1)[1].split("/", 1)[1] for r in remote]
    folder = snapshot_download(
        asked.identity,
        repo_type="dataset",
        revision=asked.revision,
        allow_patterns=[glob.escape(name) for name in names],
    )
    return _in_folder(Path(folder), asked, names), passed


def _cached(asked: Dataset) -> tuple[list[DataFile], list[str]]:
    """As downloaded before, where the hub does not answer. Raises when a file that is asked for is missing."""
    import huggingface_hub

    options: dict[str, Any] = {"repo_type": "dataset", "revision": asked.revision}
    tree = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if tree is not None:  # since 2.0: what the hub had, of which perhaps a part was fetched
        inside = [item.path for item in tree(asked.identity, **options)]
    else:
        folder = Path(huggingface_hub.snapshot_download(asked.identity, local_files_only=True, **options))
        inside = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    names, passed = _chosen(asked, [n for n in inside if not n.startswith(".")])
    options["allow_patterns"] = [glob.escape(name) for name in names]
    folder = Path(huggingface_hub.snapshot_download(asked.identity, local_files_only=True, **options))
    return _in_folder(folder, asked, names), passed


def _in_folder(folder: Path, asked: Dataset, names: Sequence[str]) -> list[DataFile]:
    return [DataFile(folder / n, kind_of(Path(n)) or "", f"{asked.identity}/{n}") for n in names]


def _no_dataset(identity: str, problem: Exception) -> DataError:
    """Why a hub dataset cannot be had, told by what was answered."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(problem, DataError):
        return problem
    first = (str(problem).splitlines() or ["no answer"])[0] or type(problem).__name__
    what = f"data '{identity}' is no file or folder here, and the hub does not give it"
    where = "give a file, folder or glob that exists"
    if isinstance(problem, OfflineModeIsEnabled) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return DataError(
            what,
            "HF_HUB_OFFLINE is set, and the dataset is not among those downloaded before",
            f"{where}; or, on a machine with a connection: hf download --repo-type dataset {identity}",
        )
    if isinstance(problem, GatedRepoError):
        return DataError(
            what, "it is gated: its owner gives access by name", f"ask there, then: hf auth login; {where}"
        )
    if isinstance(problem, RepositoryNotFoundError):
        return DataError(
            what, "the hub knows no dataset of that name that you may see", f"check the id; {where}"
        )
    return DataError(
        what, f"it did not answer as hoped: {first}", f"check the connection (HF_ENDPOINT); {where}"
    )
