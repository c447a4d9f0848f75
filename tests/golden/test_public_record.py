"""The golden answers against what people published: each agrees, or says why not."""

import re
from pathlib import Path

import pytest

PLANS = Path(__file__).parent / "plans"
# answer -> (what it must say, who found the same or why it differs)
RECORD = {
    "65b-qlora-on-one-48-gb-card": (
        r"Train QLoRA adapters .* on 1xRTX-A6000",
        "Dettmers et al. 2023 (arXiv 2305.14314): 65B on one 48 GB card",
    ),
    "70b-qlora-on-two-24-gb-cards": (
        r"fsdp2 \+ all on cpu on 2xRTX3090",
        "peft's docs on FSDP: 70B QLoRA on two 24 GB cards with offload, 19.6 GB",
    ),
    "405b-qlora-on-8-a100": (
        r"Train QLoRA adapters .* with fsdp2 on 8xA100-80GB",
        "torchtune's README: 405B QLoRA on 8 A100, 44.8 GB with full recomputation, 653 tokens/s in all",
    ),
    "7b-lora-on-one-24-gb-card": (
        r"Train LoRA adapters on 1xRTX4090",
        "torchtune's README: Llama-2-7B LoRA on one RTX 4090",
    ),
    "7b-qlora-on-a-free-t4": (
        r"on 1xT4, .* of 15\.00 GiB",
        "bitsandbytes' 4-bit announcement (Hugging Face, May 2023): even a 20B model in Colab's free T4",
    ),
    "7b-full-on-4-h100": (
        r"full    fsdp2 +4xH100-80GB",
        "llm-foundry's tables: 7B in full sharded over 8 A100-40GB, as much memory in all",
    ),
    "13b-full-on-8-h100": (
        r"Train all weights with fsdp2 on 8xH100-80GB",
        "llm-foundry's tables: 13B in full on 8 A100-40GB with full recomputation; twice the memory needs none",
    ),
    "70b-full-how-many-h100": (
        r"(?s)full    (?:ZeRO-3|fsdp2) \+ all on cpu +8xH100-80GB.*H100-80GB +full 32",
        "torchtune's README: 70B in full on 8 A100-80GB with the optimizer on the host",
    ),
    "8b-full-on-one-card-with-offload": (
        r"Train all weights with ZeRO-2 \+ optimizer on cpu on 1xA100-80GB",
        "ZeRO-Offload (arXiv 2101.06840): 13B on one 32 GB card",
    ),
    "671b-mixture-on-64-h100": (
        r"Expert parallelism, which public runs of the largest mixtures use, is not an engine here",
        "DeepSeek-V3's report trains with expert and pipeline parallelism; the answer says why it is slow here",
    ),
}
# Questions without a published run of the same kind: budgets, prices, slow networks, single choices of a buyer.
WITHOUT = {
    "2b-big-vocabulary-long-sequences",
    "30b-mixture-lora-on-8-a100",
    "70b-full-on-slow-network",
    "8b-full-budget-too-small",
    "8b-full-within-budget-and-deadline",
    "8b-lora-bought",
    "8b-three-methods-on-8-h100",
}


@pytest.mark.parametrize("name", sorted(RECORD))
def test_an_answer_agrees_with_the_public_record_or_says_why_not(name: str) -> None:
    said, _ = RECORD[name]
    assert re.search(said, (PLANS / f"{name}.txt").read_text())


def test_at_least_twelve_questions_are_kept() -> None:
    names = {p.stem for p in PLANS.glob("*.txt")}
    assert len(names) >= 12
    assert names == set(RECORD) | WITHOUT
