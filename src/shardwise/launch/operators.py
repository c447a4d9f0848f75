"""DeepSpeed's compiled operators: where they lie, which a recipe needs, building them before anything starts.

DeepSpeed compiles an operator when it is first used, in silence, for minutes, in every rank; a process killed
meanwhile leaves a file `lock` on which every later run waits forever. So operators are built here, once, before
the ranks start, and the ranks load the finished libraries without looking at the lock.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.errors import MissingDependencyError, RunError
from shardwise.recipe.schema import Recipe
from shardwise.units import format_seconds

# name -> (folder and library, what it is for, seconds it took on two cores)
OPERATORS = {
    "shm_comm": ("deepspeed_shm_comm", "collectives between ranks on one CPU machine", 30),
    "cpu_adam": ("cpu_adam", "AdamW on states in host memory (offload)", 40),
    "pin_memory": ("pin_memory", "page-locked buffers of async_io", 25),
    "async_io": ("async_io", "reading and writing states on NVMe", 140),
}


@dataclass(frozen=True)
class OperatorState:
    """`state`: built, missing, building (by `pid`), or stale (a lock whose owner is gone)."""

    name: str
    state: str
    path: Path
    purpose: str
    pid: int | None = None


def extensions_path(device: str) -> Path:
    """The folder for this machine's builds; libraries of another torch, DeepSpeed, Python or CPU never match.

    Raises MissingDependencyError when torch or deepspeed is not installed.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = [f"{name}{_version(name)}" for name in ("torch", "deepspeed")]
    parts += [f"cp{sys.version_info[0]}{sys.version_info[1]}", platform.machine(), _processor(), device]
    return cache / "shardwise" / "extensions" / "-".join(parts)


def needed(recipe: Recipe) -> tuple[str, ...]:
    """Operators that this recipe's run will load."""
    if recipe.engine.name != "deepspeed":
        return ()
    section = recipe.engine.deepspeed
    names = ["shm_comm"] if recipe.engine.device in ("cpu", "auto") else []
    if section.offload_optimizer != "none":
        names.append("cpu_adam")
    if "nvme" in (section.offload_optimizer, section.offload_parameters):
        names += ["pin_memory", "async_io"]
    return tuple(names)


def environment(device: str) -> dict[str, str]:
    """Variables for the ranks of a DeepSpeed run."""
    return {"TORCH_EXTENSIONS_DIR": str(extensions_path(device)), "DS_ACCELERATOR": device}


def ready(recipe: Recipe, say: Callable[[str], None]) -> dict[str, str]:
    """Build what this recipe needs and is missing; returns the variables that its ranks get."""
    device = "cpu" if recipe.engine.device == "auto" else recipe.engine.device
    if recipe.engine.name != "deepspeed":
        return {"DS_ACCELERATOR": device}  # libraries import an installed DeepSpeed, which guesses aloud
    build(needed(recipe), device, say)
    return environment(device)


def states(device: str) -> list[OperatorState]:
    """What is built here."""
    folder = extensions_path(device)
    return [_state(folder, name) for name in OPERATORS]


def _state(folder: Path, name: str) -> OperatorState:
    directory, purpose, _ = OPERATORS[name]
    path = folder / directory / f"{directory}.so"
    lock = folder / directory / "lock"
    if lock.exists():
        pid = holder(lock)
        return OperatorState(name, "building" if pid else "stale", path, purpose, pid)
    return OperatorState(name, "built" if path.is_file() else "missing", path, purpose)


def holder(lock: Path) -> int | None:
    """The process that keeps torch's lock file open, as its owner does; None when there is none.

    Without /proc nobody can tell: a lock younger than half an hour counts as held (by process 0).
    """
    if not Path("/proc/self/fd").is_dir():
        return 0 if time.time() - lock.stat().st_mtime < 1800 else None
    target = str(lock.resolve())
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if any(os.readlink(fd) == target for fd in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None


def build(names: Sequence[str], device: str, say: Callable[[str], None]) -> None:
    """Compile what is missing of `names`, one after the other, telling the progress; clears stale locks.

    Raises MissingDependencyError without a compiler, ninja or a header, RunError when a compilation fails.
    """
    folder = extensions_path(device)
    folder.mkdir(parents=True, exist_ok=True)
    with _own_lock(folder, say):
        for name in names:
            found = _state(folder, name)
            if found.state == "building":
                _wait_for(folder, name, say)
                found = _state(folder, name)
            if found.state == "stale":
                lock = found.path.parent / "lock"
                lock.unlink()
                say(f"removed {lock}: the process that was building {name} is gone")
                found = _state(folder, name)
            if found.state == "missing":
                _require_tools(name)
                _compile(folder, name, device, say)


def _compile(folder: Path, name: str, device: str, say: Callable[[str], None]) -> None:
    directory, purpose, usual_seconds = OPERATORS[name]
    say(
        f"compiling {name} ({purpose}), once for this machine; about {format_seconds(usual_seconds)} on two cores"
    )
    log = folder / f"{directory}.log"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": device}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    began = time.monotonic()
    next_word = began + 10
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.training.engines.operators", name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() >= next_word:
                    next_word += 10
                    say(f"  {name}: {_progress(log)}, {format_seconds(time.monotonic() - began)}")
        except BaseException:
            process.terminate()
            process.wait()
            (folder / directory / "lock").unlink(missing_ok=True)
            raise
    if process.returncode or not _state(folder, name).path.is_file():
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        wrong = next((line for line in lines if "error:" in line), lines[-1] if lines else "it said nothing")
        raise RunError(
            f"DeepSpeed's operator {name} could not be compiled",
            wrong.strip()[:300],
            f"the whole log: {log}",
        )
    say(f"  {name}: ready after {format_seconds(time.monotonic() - began)}")


def _progress(log: Path) -> str:
    """The last `[3/13]` of ninja."""
    steps = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("[")]
    count = steps[-1].partition("]")[0].strip("[") if steps else ""
    return f"part {count}" if "/" in count else "starting"


def _wait_for(folder: Path, name: str, say: Callable[[str], None]) -> None:
    found = _state(folder, name)
    say(f"{name} is being compiled by process {found.pid}; waiting for it")
    while _state(folder, name).state == "building":
        time.sleep(0.5)


@contextmanager
def _own_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One builder per folder. The kernel frees this lock when its owner dies, however it dies."""
    with (folder / ".builder").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another shardwise is compiling operators; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def missing_tools(name: str) -> list[str]:
    """What this machine lacks to compile an operator, each with how to get it."""
    lacks = []
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        lacks.append("a C++ compiler (Debian: apt install g++)")
    if not (shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()):
        lacks.append("ninja (pip install ninja)")
    if name == "async_io" and not _has_libaio():
        lacks.append("libaio with its header (Debian: apt install libaio-dev)")
    return lacks


def _has_libaio() -> bool:
    """libaio.h where compilers look, or where CFLAGS points."""
    flags = [f[2:] for f in os.environ.get("CFLAGS", "").split() if f.startswith("-I")]
    folders = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(os.pathsep), *flags]
    return any((Path(f) / "libaio.h").is_file() for f in folders if f)


def _require_tools(name: str) -> None:
    lacks = missing_tools(name)
    if lacks:
        raise MissingDependencyError(
            f"DeepSpeed's operator {name} has to be compiled here, and cannot be",
            f"this machine lacks {' and '.join(lacks)}",
            "install that, then: shardwise doctor --build",
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise MissingDependencyError(
            f"DeepSpeed's operators need {package}",
            "the package is not installed",
            "pip install 'shardwise[deepspeed]'",
        ) from None


def _processor() -> str:
    """A short hash of the CPU's features: builds use -march=native, and a home folder may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:8]
