"""What this machine can run, and what is missing for the rest. Works without torch."""

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardwise.errors import MissingDependencyError
from shardwise.facts.machine import Machine, detect_machine
from shardwise.launch import operators
from shardwise.recipe import Recipe
from shardwise.rules import Situation, problems, situation
from shardwise.rules.installed import FLOORS
from shardwise.units import format_bytes

PACKAGES = (
    "shardwise", "torch", "transformers", "peft", "tokenizers", "safetensors", "bitsandbytes", "deepspeed",
    "flash-attn", "numpy", "pyarrow",
)  # fmt: skip
# package -> the extra that brings it; the rest come with `train`
EXTRAS = {"bitsandbytes": "qlora", "deepspeed": "deepspeed", "pyarrow": "data"}
NEEDED_TO_TRAIN = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")

# What people want to do, as the smallest recipe that does it; the rules say whether it can be.
WISHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full fine-tuning", {"method": "full"}),
    ("LoRA", {"method": "lora"}),
    ("QLoRA (4-bit base)", {"method": "qlora"}),
    ("engine ddp", {"engine": {"name": "ddp"}}),
    ("engine fsdp2", {"engine": {"name": "fsdp2"}}),
    ("engine deepspeed, ZeRO-1 to 3", {"engine": {"name": "deepspeed", "deepspeed": {"zero_stage": 3}}}),
    (
        "deepspeed with optimizer in host memory",
        {"engine": {"name": "deepspeed", "deepspeed": {"offload_optimizer": "cpu"}}},
    ),
    (
        "deepspeed with states on NVMe",
        {
            "engine": {
                "name": "deepspeed",
                "deepspeed": {
                    "zero_stage": 3,
                    "offload_optimizer": "nvme",
                    "offload_parameters": "nvme",
                    "nvme_path": "nvme",
                },
            }
        },
    ),
    ("8-bit AdamW", {"optimizer": {"name": "adamw_8bit"}}),
    ("paged 8-bit AdamW", {"optimizer": {"name": "paged_adamw_8bit"}}),
    ("FlashAttention 2", {"model": {"source": "any", "attention": "flash_attention_2"}}),
    ("FlexAttention", {"model": {"source": "any", "attention": "flex_attention"}}),
    ("torch.compile", {"training": {"compile": True}}),
)

_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
count = torch.cuda.device_count() if cuda else 0
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
    "capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if count else None,
    "mps": bool(getattr(torch.backends, "mps", None) and torch.backends.mps.is_available()),
    "threads": torch.get_num_threads(),
}))
"""


@dataclass(frozen=True)
class Ability:
    """One thing a person may want; `why` and `hint` when it cannot be done here now."""

    name: str
    works: bool
    why: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `shardwise doctor` prints."""

    python: str
    system: str
    machine: Machine
    packages: dict[str, str | None]  # None: not installed
    too_old: tuple[str, ...]
    torch: dict[str, Any] | None
    torch_problem: str
    tools: dict[str, str | None]  # compiler and the like -> path, or None
    operators: tuple[operators.OperatorState, ...]
    extensions_path: str | None
    abilities: tuple[Ability, ...]
    notes: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Look at this machine; torch is imported in a process of its own."""
    machine = detect_machine()
    packages = {name: _version(name) for name in PACKAGES}
    torch, problem = _ask_torch() if packages["torch"] else (None, "torch is not installed")
    device = _device(torch)
    capability = torch["capability"] if torch else None
    where = situation(device, len(torch["gpus"]) if torch else 0, capability)
    built, path = _operators(device)
    abilities = tuple(_ability(name, wish, where, packages, problem, built) for name, wish in WISHES)
    old = tuple(f"{p} {where.older(p, floor)}" for p, (floor, _) in FLOORS.items() if where.older(p, floor))
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine=machine,
        packages=packages,
        too_old=old,
        torch=torch,
        torch_problem=problem,
        tools=_tools(),
        operators=built,
        extensions_path=path,
        abilities=abilities,
        notes=(*machine.notes, *_contradictions(machine, torch)),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ask_torch() -> tuple[dict[str, Any] | None, str]:
    """torch's own view of devices; a broken installation must not take the doctor down with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found, ""
        lines = done.stderr.strip().splitlines()
        return None, f"importing torch fails: {lines[-1] if lines else f'exit code {done.returncode}'}"
    except subprocess.TimeoutExpired:
        return None, "importing torch takes more than two minutes"


def _device(torch: dict[str, Any] | None) -> Any:
    if torch is None:
        return None
    return "cuda" if torch["gpus"] else "mps" if torch["mps"] else "cpu"


def _operators(device: str | None) -> tuple[tuple[operators.OperatorState, ...], str | None]:
    try:
        path = str(operators.extensions_path(device or "cpu"))
        return tuple(operators.states(device or "cpu")), path
    except MissingDependencyError:
        return (), None


def _tools() -> dict[str, str | None]:
    lacks = operators.missing_tools("async_io")
    return {
        "C++ compiler": shutil.which("c++") or shutil.which("g++"),
        "ninja": None
        if any("ninja" in lack for lack in lacks)
        else shutil.which("ninja") or "in the environment",
        "libaio.h": None if any("libaio" in lack for lack in lacks) else "found",
        "nvidia-smi": shutil.which("nvidia-smi"),
    }


def _ability(
    name: str,
    wish: dict[str, Any],
    where: Situation,
    packages: dict[str, str | None],
    torch_problem: str,
    built: tuple[operators.OperatorState, ...],
) -> Ability:
    missing = [p for p in NEEDED_TO_TRAIN if packages[p] is None]
    if missing:
        return Ability(name, False, f"{', '.join(missing)} not installed", "pip install 'shardwise[train]'")
    if torch_problem:
        return Ability(name, False, torch_problem, "reinstall torch: https://pytorch.org/get-started")
    tree = {"model": {"source": "any"}, "data": {"train": [{"path": "any"}]}, **wish}
    recipe = Recipe.model_validate(tree)
    found = problems(recipe, None, where)
    if found:
        return Ability(
            name, False, found[0].why if len(found) == 1 else "; ".join(p.why for p in found), found[0].hint
        )
    device = where.device or "cpu"
    if recipe.training.compile and device == "cpu" and not (shutil.which("c++") or shutil.which("g++")):
        return Ability(name, False, "no C++ compiler", "Debian: apt install g++")
    decided = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": device})})
    for operator in operators.needed(decided):
        state = next((s for s in built if s.name == operator), None)
        if state is None or state.state == "built":
            continue
        lacks = operators.missing_tools(operator)
        if lacks:
            return Ability(
                name, False, f"{operator} must be compiled, and {' and '.join(lacks)} is missing", lacks[0]
            )
        if state.state == "stale":
            hint = f"shardwise doctor --build (or delete {state.path.parent / 'lock'})"
            return Ability(name, False, f"a killed build of {operator} left its lock", hint)
        return Ability(name, True, f"{operator} is compiled first", "beforehand: shardwise doctor --build")
    return Ability(name, True)


def _contradictions(machine: Machine, torch: dict[str, Any] | None) -> list[str]:
    if torch is None:
        return []
    notes = []
    if machine.gpus and not torch["gpus"]:
        build = "has no CUDA" if torch["cuda"] is None else f"is built for CUDA {torch['cuda']}"
        notes.append(
            f"nvidia-smi lists {len(machine.gpus)} GPU(s) and torch sees none: torch {torch['version']} {build}; "
            "install the build for your driver: https://pytorch.org/get-started"
        )
    if machine.memory_bytes < 4 * 2**30:
        notes.append(f"{format_bytes(machine.memory_bytes)} of memory is little even for small models")
    return notes
