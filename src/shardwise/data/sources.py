"""What a recipe's `path` means: a file, a folder, a glob, or a hub dataset id -> the files, in a fixed order."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

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
_HUB = re.compile(r"^(?:hf://datasets/)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?(?::([\w-]+))?$")


@dataclass(frozen=True)
class DataFile:
    path: Path
    kind: str
    name: str  # as the person wrote it, or relative to the folder they named


def kind_of(path: Path) -> str | None:
    """jsonl, json, csv, parquet, arrow or text, by the name; None for anything else."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        suffix = Path(path.stem).suffix.lower()
    return KINDS.get(suffix)


def find_files(path: str) -> tuple[list[DataFile], list[str]]:
    """(files, names of files passed over because their kind is unknown). Raises DataError."""
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
        return _hub(hub[1], hub[2], hub[3])
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
        if kind is None or path.name in ("dataset_info.json", "state.json", "dataset_dict.json"):
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


def _hub(identity: str, revision: str | None, split: str | None) -> tuple[list[DataFile], list[str]]:
    """The data files of one split (train unless named with :split) of a dataset on the hub."""
    from huggingface_hub import snapshot_download

    patterns = [f"*{ending}{packed}" for ending in KINDS if ending != ".md" for packed in ("", *PACKED)]
    try:
        folder = Path(
            snapshot_download(identity, repo_type="dataset", revision=revision, allow_patterns=patterns)
        )
    except (OSError, ValueError) as problem:
        raise DataError(
            f"data '{identity}' is neither here nor on the hub",
            (str(problem).splitlines() or ["no answer"])[0],
            "give a file, folder or glob that exists, or check the dataset id and the connection",
        ) from None
    found, passed = _folder(folder, identity)
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
