"""`shardwise doctor` tells what is here and what is missing, with and without torch."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from shardwise.cli.doctor import as_data, as_text, doctor
from shardwise.launch import diagnosis, operators
from shardwise.launch.diagnosis import Diagnosis, diagnose


@pytest.fixture(scope="module")
def here() -> Diagnosis:
    return diagnose()


def test_it_names_versions_devices_and_abilities(here: Diagnosis) -> None:
    text = as_text(here)
    assert f"Python {here.python}" in text and "torch" in text
    assert "What can run here" in text and "+ LoRA" in text
    data = as_data(here)
    assert data["abilities"]["LoRA"]["works"] and data["cores"] >= 1
    assert json.loads(json.dumps(data)) == data


def test_what_cannot_run_says_why_and_what_to_do(here: Diagnosis) -> None:
    broken = [a for a in here.abilities if not a.works]
    assert all(a.why and a.hint for a in broken)
    if here.torch and not here.torch["gpus"]:
        assert any(a.name == "FlashAttention 2" for a in broken)


def test_without_torch_it_works_and_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = diagnosis._version
    gone = {"torch", "transformers", "peft", "bitsandbytes", "deepspeed"}
    monkeypatch.setattr(diagnosis, "_version", lambda name: None if name in gone else real(name))
    monkeypatch.setattr(operators, "_version", _missing)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    found = diagnose()
    text = as_text(found)
    assert "- torch not installed" in text and "pip install 'shardwise[train]'" in text
    assert not any(a.works for a in found.abilities) and "+ plan: always" in text


def _missing(package: str) -> str:
    from shardwise.errors import MissingDependencyError

    raise MissingDependencyError(f"needs {package}", "not installed", "pip install it")


def test_a_broken_torch_is_told_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_ASK_TORCH", "raise ImportError('libcudart.so.12: not found')")
    found = diagnose()
    assert "libcudart.so.12" in found.torch_problem and "libcudart.so.12" in as_text(found)


def test_a_stale_lock_is_told_with_the_way_to_clear_it(here: Diagnosis) -> None:
    if not here.operators:
        pytest.skip("DeepSpeed is not installed")
    stale = tuple(replace(s, state="stale") for s in here.operators)
    assert "doctor --build" in as_text(replace(here, operators=stale))


def test_json_goes_to_stdout_alone() -> None:
    result = CliRunner().invoke(doctor, ["--json"])
    assert result.exit_code == 0 and "abilities" in json.loads(result.stdout)


def test_torch_is_not_imported_by_the_command_itself() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from shardwise.cli.doctor import doctor; doctor(['--json'], standalone_mode=False); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=120)
