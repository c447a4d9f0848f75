"""The run folder: where each file of a run lies, who may write it, and how it is read back.

runs/NAME/
  recipe.yaml     the recipe with every default resolved
  plan.json       what was estimated before the run
  events.jsonl    one line per event, in order of time
  status.json     running, done, failed, interrupted or refused, and why
  summary.json    estimate against measurement, at the end
  report.html     the same to look at
  logs/           what each rank wrote
  checkpoints/step-00000100/   whole once it holds a file `complete`
  adapter/ or model/           the result
  lock            who is at work here
"""

import atexit
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from shardwise.errors import UsageError, nearest, unknown_name
from shardwise.runs import lock, tracking
from shardwise.runs.jsonfile import read_json, read_lines, to_json, write_json
from shardwise.runs.records import EVENTS, Event, Resume, State, Status, Step, Summary

LATEST = "latest"
COMPLETE = "complete"
E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class CheckpointFolder:
    step: int
    path: Path


class RunFolder:
    """One run on disk. Anyone may read; writing is for the holder of the lock and the rank 0 it started."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.name = self.path.name
        self.recipe_path = self.path / "recipe.yaml"
        self.plan_path = self.path / "plan.json"
        self.events_path = self.path / "events.jsonl"
        self.status_path = self.path / "status.json"
        self.summary_path = self.path / "summary.json"
        self.report_path = self.path / "report.html"
        self.logs_path = self.path / "logs"
        self.checkpoints_path = self.path / "checkpoints"
        self.adapter_path = self.path / "adapter"
        self.model_path = self.path / "model"
        self.lock_path = self.path / "lock"
        self._events_file: IO[bytes] | None = None
        self._trackers: dict[str, tracking.Tracker] = {}

    # --- writing

    def acquire(self) -> None:
        """Take the folder for this process; a new run has it. Raises UsageError naming a live holder."""
        lock.acquire(self.lock_path)

    def refuse_if_held(self) -> None:
        """Raise UsageError naming the live process at work here, before any work is done for nothing."""
        lock.refuse_if_held(self.lock_path)

    def track(self, names: Sequence[str], config: Mapping[str, Any]) -> None:
        """Send every further event to these trackers too, until `release` or the process's end.

        Raises UnknownNameError or MissingDependencyError; what goes wrong in a tracker itself is a warning event.
        """
        tracking.check(names)
        for name in names:
            try:
                self._trackers[name] = tracking.open_tracker(name, self.path, config)
            except Exception as problem:
                self._untrack(name, problem)
        if self._trackers:
            atexit.register(self._close_trackers)

    def release(self) -> None:
        """Give the folder back and close its files; nothing happens where another process holds it."""
        self._close_trackers()
        if self._events_file is not None:
            self._events_file.close()
            self._events_file = None
        lock.release(self.lock_path)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one JSON line with `kind`, `time` and the fields of `records.EVENTS[kind]`, and flush it.

        Raises ValueError for an unknown kind or a field that is missing or of the wrong type.
        """
        if kind not in EVENTS:
            raise ValueError(f"unknown event kind '{kind}', known: {', '.join(EVENTS)}")
        record = EVENTS[kind].model_validate({"time": time.time(), **fields, "kind": kind})
        line = to_json(record.model_dump(exclude_unset=True)) + "\n"
        if self._events_file is None:
            self._events_file = _open_for_append(self.events_path)
        self._events_file.write(line.encode("utf-8", "backslashreplace"))
        self._events_file.flush()
        for name, tracker in list(self._trackers.items()):
            try:
                tracking.send(tracker, record)
            except Exception as problem:
                self._untrack(name, problem)

    def _untrack(self, name: str, problem: Exception) -> None:
        """A tracker that fails is left out from here on; the run is what matters."""
        self._trackers.pop(name, None)
        self.event("warning", message=f"{name} is not told any more: {type(problem).__name__}: {problem}")

    def _close_trackers(self) -> None:
        for name, tracker in list(self._trackers.items()):
            del self._trackers[name]
            try:
                tracker.close()
            except Exception as problem:
                self._untrack(name, problem)

    def write_summary(self, summary: Mapping[str, Any] | Summary) -> None:
        """Put summary.json in place in one move. Raises ValueError when it is not a `records.Summary`."""
        whole = summary if isinstance(summary, Summary) else Summary.model_validate(dict(summary))
        write_json(self.summary_path, whole.model_dump())

    def status(self, state: State, reason: str = "", exit_code: int | None = None) -> None:
        """Put status.json in place in one move."""
        write_json(
            self.status_path,
            Status(state=state, reason=reason, exit_code=exit_code, time=time.time()).model_dump(),
        )

    def discard(self) -> None:
        """Remove the folder and all in it: for a run that was refused before it started."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()  # only when it held nothing else

    # --- reading

    def read_status(self) -> Status:
        """What status.json says; a running run whose process is gone is told as failed, with that reason."""
        found = _model(Status, read_json(self.status_path)) or Status(
            state="failed", reason="status.json is missing or broken"
        )
        if found.state != "running":
            return found
        holder = lock.holder(self.lock_path)
        if holder is None:
            return found.model_copy(
                update={"state": "failed", "reason": "it ended without a word and nobody holds its folder"}
            )
        if not holder.alive():
            return found.model_copy(
                update={
                    "state": "failed",
                    "reason": f"{holder} ended without a word (killed, or the machine went down)",
                }
            )
        return found

    @property
    def state(self) -> State:
        return self.read_status().state

    def holder(self) -> lock.Holder | None:
        """Who works here now; None when nobody does."""
        found = lock.holder(self.lock_path)
        return found if found and found.alive() else None

    def events(self, kind: str | None = None) -> Iterator[Event]:
        """Typed events in order of time; lines that no record takes are passed over."""
        for _, event in self.events_from(0):
            if kind is None or event.kind == kind:
                yield event

    def events_from(self, offset: int) -> Iterator[tuple[int, Event]]:
        """(byte offset behind it, event) from byte `offset` on: a reader keeps the offset and comes back."""
        for behind, fields in self.lines_from(offset):
            event = _model(EVENTS.get(str(fields.get("kind")), Event), fields)
            if event is not None:
                yield behind, event

    def lines_from(self, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """As `events_from`, not checked: for a hundred thousand steps."""
        return read_lines(self.events_path, offset)

    def history(self, kind: type[E]) -> list[E]:
        """Events of one class as the run stands now, without what a resume from a checkpoint undid."""
        kept: list[E] = []
        for event in self.events():
            if isinstance(event, kind):
                kept.append(event)
            elif isinstance(event, Resume):
                resumed = event.step
                kept = [e for e in kept if (getattr(e, "step", None) or 0) <= resumed]
        return kept

    def steps(self) -> list[Step]:
        return self.history(Step)

    def summary(self) -> Summary | None:
        """None while the run has not ended."""
        return _model(Summary, read_json(self.summary_path))

    def plan(self) -> dict[str, Any]:
        return read_json(self.plan_path) or {}

    def recipe_text(self) -> str:
        """Raises UsageError when the folder holds no readable recipe."""
        try:
            return self.recipe_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(
                f"run '{self.name}' has no readable recipe", str(problem), f"look into '{self.path}'"
            ) from None

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / f"step-{step:08d}"

    def checkpoints(self) -> list[CheckpointFolder]:
        """Whole checkpoints, earliest step first; one without its `complete` file is not one."""
        found = []
        for path in self.checkpoints_path.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit() and (path / COMPLETE).exists():
                found.append(CheckpointFolder(int(number), path))
        return sorted(found, key=lambda c: c.step)

    @property
    def result_path(self) -> Path | None:
        """The trained adapter or model; None while there is none."""
        return next((p for p in (self.adapter_path, self.model_path) if p.is_dir()), None)

    @property
    def created_unix_seconds(self) -> float:
        for path in (self.recipe_path, self.path):
            with suppress(OSError):
                return path.stat().st_mtime
        return 0.0

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def list_runs(folder: str | Path = "runs") -> list[RunFolder]:
    """Every run in a folder, newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    runs = [RunFolder(p) for p in folder.iterdir() if is_run(p)]
    return sorted(runs, key=lambda r: (r.created_unix_seconds, r.name), reverse=True)


def is_run(path: Path) -> bool:
    """A run folder is known by its recipe and its status."""
    return path.is_dir() and (path / "recipe.yaml").is_file() and (path / "status.json").is_file()


def open_run(name_or_path: str | Path, folder: str | Path = "runs") -> RunFolder:
    """The run of a path, a name in `folder`, a beginning only one name has, or `latest`.

    Raises UnknownNameError with the nearest names.
    """
    wanted = str(name_or_path)
    if wanted and is_run(Path(wanted)):
        return RunFolder(Path(wanted))
    runs = list_runs(folder)
    if not runs:
        raise UsageError(
            f"no run '{wanted}'", f"there are no runs in '{folder}'", "make one: shardwise train RECIPE.yaml"
        )
    if wanted == LATEST:
        return runs[0]
    names = {run.name: run for run in runs}
    if wanted in names:
        return names[wanted]
    starting = sorted(n for n in names if wanted and n.startswith(wanted))
    if len(starting) == 1:
        return names[starting[0]]
    if starting:
        raise UsageError(
            f"'{wanted}' begins the name of {len(starting)} runs",
            f"they are: {', '.join(starting[:8])}{' ...' if len(starting) > 8 else ''}",
            "write more of the name, or 'latest'",
        )
    close = nearest(wanted, names)
    raise unknown_name(
        "run",
        wanted,
        names,
        f"did you mean {' or '.join(close)}? all of them: shardwise runs"
        if close
        else "all of them: shardwise runs",
    )


def _open_for_append(path: Path) -> IO[bytes]:
    """A file whose next write starts a line, also after a crash in the middle of one."""
    file = path.open("ab")
    if file.tell() > 0:
        with path.open("rb") as reader:
            reader.seek(-1, os.SEEK_END)
            if reader.read(1) != b"\n":
                file.write(b"\n")
    return file


M = TypeVar("M", bound=BaseModel)


def _model(kind: type[M], fields: dict[str, Any] | None) -> M | None:
    if fields is None:
        return None
    try:
        return kind.model_validate(fields)
    except (ValidationError, json.JSONDecodeError):
        return None
