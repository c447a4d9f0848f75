"""Questions a buyer would ask, and their whole answers as text. A change shows as a diff that its author explains.

Write them anew with: SHARDWISE_WRITE_GOLDEN=1 pytest tests/golden/test_plans.py
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli.plan import plan

FOLDER = Path(__file__).parent / "plans"
QUESTIONS = {
    "7b-lora-on-one-24-gb-card": "meta-llama/Llama-2-7b-hf --method lora --gpus RTX4090 --tokens 5M",
    "7b-qlora-on-a-free-t4": "mistralai/Mistral-7B-v0.3 --method qlora --gpus T4 --tokens 1M",
    "7b-full-on-4-h100": "meta-llama/Llama-2-7b-hf --method full --gpus 4xH100-80GB --tokens 50M --explain",
    "13b-full-on-8-h100": "meta-llama/Llama-2-13b-hf --method full --gpus 8xH100-80GB --tokens 50M",
    "65b-qlora-on-one-48-gb-card": "huggyllama/llama-65b --method qlora --gpus RTX-A6000 "
    "--sequence-length 512 --tokens 5M",
    "70b-qlora-on-two-24-gb-cards": "meta-llama/Llama-2-70b-hf --method qlora --gpus 2xRTX3090 --tokens 1M",
    "70b-full-how-many-h100": "meta-llama/Llama-3.1-70B --method full --gpus 8xH100-80GB --gpus 16xH100-80GB "
    "--gpus 32xH100-80GB --tokens 100M",
    "70b-full-on-slow-network": "meta-llama/Llama-3.1-70B --method full --gpus 32xH100-80GB "
    "--network eth-25 --tokens 100M",
    "671b-mixture-on-64-h100": "deepseek-ai/DeepSeek-V3 --gpus 64xH100-80GB --tokens 100M",
    "8b-full-on-one-card-with-offload": "meta-llama/Llama-3.1-8B --method full --gpus 1xA100-80GB "
    "--tokens 10M --explain",
    "8b-three-methods-on-8-h100": "meta-llama/Llama-3.1-8B --gpus 8xH100-80GB --tokens 10M",
    "8b-full-within-budget-and-deadline": "meta-llama/Llama-3.1-8B --method full --tokens 100M --budget 500usd "
    "--deadline 12h",
    "8b-full-budget-too-small": "meta-llama/Llama-3.1-8B --method full --tokens 1B --budget 5usd "
    "--deadline 1h",
    "30b-mixture-lora-on-8-a100": "Qwen/Qwen3-30B-A3B --method lora --gpus 8xA100-80GB --tokens 20M",
    "2b-big-vocabulary-long-sequences": "google/gemma-2-2b --method lora --gpus RTX4090 "
    "--sequence-length 8192 --tokens 5M",
    "405b-qlora-on-8-a100": "meta-llama/Llama-3.1-405B --method qlora --gpus 8xA100-80GB --tokens 5M",
    "8b-lora-bought": "meta-llama/Llama-3.1-8B --method lora --gpus RTX4090 --gpus L40S "
    "--gpus H100-80GB --buy --tokens 1B",
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_golden_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(plan, shlex.split(QUESTIONS[name]), catch_exceptions=False)
    assert result.exit_code == 0
    notes = "note: this machine has no GPU"  # of the machine the test runs on
    lines = [line for line in result.stdout.splitlines() if not line.startswith(notes)]
    lines = [  # whose numbers are of another room
        re.sub(r"(shardwise/training/\S+\.py):\d+", r"\1:LINE", line) for line in lines
    ]
    text = f"$ shardwise plan {QUESTIONS[name]}\n\n" + "\n".join(lines) + "\n"
    file = FOLDER / f"{name}.txt"
    if os.environ.get("SHARDWISE_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_the_docs_show_a_golden_answer() -> None:
    """docs/plan.md shows the first part of one of the answers above; written anew together with them."""
    docs = Path(__file__).parents[2] / "docs" / "plan.md"
    answer = (FOLDER / "8b-three-methods-on-8-h100.txt").read_text().split("\n\n", 1)[1]
    shown = answer[: answer.index("recommended to steer")].rstrip()
    text = docs.read_text()
    start = text.index("```\nmeta-llama/Llama-3.1-8B: 8.03 B") + 4
    end = text.index("\n```", start)
    if os.environ.get("SHARDWISE_WRITE_GOLDEN"):
        docs.write_text(text[:start] + shown + text[end:])
    else:
        assert text[start:end] == shown
