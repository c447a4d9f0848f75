"""What a recipe's `path` means: a file, a folder, a glob, or a hub dataset id -> the files, in a fixed order."""

import glob
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

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
_HUB = re.compile(r"^(?:hf://datasets/)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?(?::([\w-]+))?$")


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
    if glob.has_magic(path):
        found = sorted(Path(p) for p in glob.glob(str(place), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(
                f"no file matches '{path}'", "the pattern finds nothing", "check it with: ls " + path
            )
        return [DataFile(p, _kind_or_error(p), str(p)) for p in found], []
    hub = _HUB.match(path)
    if hub and kind_of(place) is None and not place.parent.is_dir():
        return _hub(hub[1], hub[2], hub[3], fetch)
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
    if not found:
        raise DataError(
            f"folder '{name}' holds no data",
            f"no file in it ends in {', '.join(KINDS)}"
            + (f"; it holds {', '.join(passed[:5])}" if passed else ""),
            "name the folder with the data files",
        )
    return found, passed


def _hub(
    identity: str, revision: str | None, split: str | None, fetch: bool
) -> tuple[list[DataFile], list[str]]:
    """The data files of one split (train unless named with :split) of a dataset on the hub."""
    try:
        found, passed = _fetched(identity, revision) if fetch else _listed(identity, revision)
    except (OSError, ValueError) as problem:
        raise _no_dataset(identity, problem) from None
    wanted = split or "train"
    named = [f for f in found if re.search(rf"(^|[^a-z]){re.escape(wanted)}([^a-z]|$)", f.name.lower())]
    if named:
        passed += [f.name for f in found if f not in named]
        return named, passed
    if split:
        names = ", ".join(f.name for f in found[:8])
        raise DataError(
            f"dataset '{identity}' has no split '{split}'", f"its files are {names}", "name another"
        )
    return found, passed


def _fetched(identity: str, revision: str | None) -> tuple[list[DataFile], list[str]]:
    from huggingface_hub import snapshot_download

    patterns = [f"*{ending}{packed}" for ending in KINDS if ending != ".md" for packed in ("", *PACKED)]
    folder = snapshot_download(identity, repo_type="dataset", revision=revision, allow_patterns=patterns)
    return _folder(Path(folder), identity)


def _listed(identity: str, revision: str | None) -> tuple[list[DataFile], list[str]]:
    """As `_fetched`, without a byte of the files themselves; of one commit, so that a run sees one state."""
    from huggingface_hub import HfApi

    api = HfApi()
    commit = api.dataset_info(identity, revision=revision).sha
    found, passed = [], []
    for item in api.list_repo_tree(identity, repo_type="dataset", revision=commit, recursive=True):
        size = getattr(item, "size", None)
        path = PurePosixPath(item.path)
        if size is None or any(part.startswith(".") for part in path.parts):
            continue
        kind = kind_of(path)
        if kind is None or path.suffix == ".md" or path.name in _NO_DATA:
            passed.append(item.path)
        else:
            remote = Remote(f"datasets/{identity}@{commit}/{item.path}", int(size))
            found.append(DataFile(remote, kind, f"{identity}/{item.path}"))
    if not found:
        raise ValueError(f"no file of it ends in {', '.join(KINDS)}; it holds {', '.join(passed[:5])}")
    return sorted(found, key=lambda f: f.name), passed


def _no_dataset(identity: str, problem: Exception) -> DataError:
    """Why a hub dataset cannot be had, told by what was answered."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

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
    return DataError(what, f"no answer that helps: {first}", f"check the connection (HF_ENDPOINT); {where}")
