"""DeepSpeed's operators: where builds lie, stale locks, what a recipe needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import MissingDependencyError
from shardwise.launch import operators
from shardwise.recipe import parse_recipe

DEEPSPEED = (
    "model: toy\ndata: rows.jsonl\nengine: {name: deepspeed, device: cpu, deepspeed: {zero_stage: 3, %s}}"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def state(name: str) -> operators.OperatorState:
    return next(s for s in operators.states("cpu") if s.name == name)


def library(folder: Path, name: str) -> Path:
    path = folder / name / f"{name}.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return path


def test_states_are_told_apart(folder: Path) -> None:
    assert state("cpu_adam").state == "missing"
    library(folder, "cpu_adam")
    assert state("cpu_adam").state == "built"


def test_a_lock_without_an_owner_is_stale_and_one_with_an_owner_is_not(folder: Path) -> None:
    lock = library(folder, "async_io").parent / "lock"
    lock.write_text("")
    assert state("async_io").state == "stale"
    code = f"import os; fd = os.open({str(lock)!r}, os.O_RDONLY); print(1, flush=True); input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline()
    found = state("async_io")
    assert found.state == "building" and found.pid == owner.pid
    owner.communicate(b"\n")
    assert state("async_io").state == "stale"


def test_a_stale_lock_is_removed_and_told(folder: Path) -> None:
    (library(folder, "cpu_adam").parent / "lock").write_text("")
    said: list[str] = []
    operators.build(["cpu_adam"], "cpu", said.append)
    assert state("cpu_adam").state == "built"
    assert any("removed" in line and "lock" in line for line in said)


def test_building_without_a_compiler_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "missing_tools", lambda name: ["a C++ compiler (Debian: apt install g++)"])
    with pytest.raises(MissingDependencyError) as caught:
        operators.build(["async_io"], "cpu", lambda _: None)
    assert "apt install g++" in caught.value.why and "doctor --build" in caught.value.hint


def test_a_failed_compilation_is_told_with_its_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.errors import RunError

    script = folder / "python"
    script.write_text("#!/bin/sh\necho 'x.cpp:1:1: error: no such thing'; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(operators, "missing_tools", lambda name: [])
    monkeypatch.setattr(operators.sys, "executable", str(script))
    with pytest.raises(RunError, match="cpu_adam") as caught:
        operators.build(["cpu_adam"], "cpu", lambda _: None)
    assert "no such thing" in caught.value.why and str(folder) in caught.value.hint


def test_a_recipe_needs_what_it_offloads() -> None:
    plain = parse_recipe(DEEPSPEED % "offload_optimizer: none")
    cpu = parse_recipe(DEEPSPEED % "offload_optimizer: cpu")
    nvme = parse_recipe(DEEPSPEED % "offload_optimizer: nvme, nvme_path: /x")
    assert operators.needed(plain) == ("shm_comm",)
    assert operators.needed(cpu) == ("shm_comm", "cpu_adam")
    assert operators.needed(nvme) == ("shm_comm", "cpu_adam", "pin_memory", "async_io")
    assert operators.needed(parse_recipe("model: toy\ndata: x.jsonl")) == ()


def test_builds_are_kept_apart_by_version_and_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = {operators.extensions_path("cpu"), operators.extensions_path("cuda")}
    monkeypatch.setattr(operators, "_version", lambda package: "0.1")
    paths.add(operators.extensions_path("cpu"))
    monkeypatch.setattr(operators, "_processor", lambda: "other")
    paths.add(operators.extensions_path("cpu"))
    assert len(paths) == 4 and all(str(p).startswith(str(tmp_path)) for p in paths)
    assert os.sep not in operators.extensions_path("cpu").name
