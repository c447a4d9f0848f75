# ruff: noqa: E501
"""Each rule refuses what it must, names the key, and its hint leads to something legal."""

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import RuleError
from shardwise.facts.model import ModelShape
from shardwise.recipe.schema import Recipe
from shardwise.rules import RULES, Situation, check, problems
from shardwise.rules.problem import situation

SHAPE = ModelShape(
    source="toy",
    model_type="llama",
    family="llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=100,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    mlp="gated",
    num_experts=0,
    experts_per_token=0,
    moe_intermediate_size=0,
    shared_expert_intermediate_size=0,
    moe_layers=(),
    sliding_window=None,
    full_attention_layers=2,
    dtype="bf16",
    has_chat_template=True,
    needs_own_code=False,
    tensors=(),
    total_parameters=1000,
    active_parameters=1000,
)
CUDA = Situation(
    "cuda", 2, "9.0", dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes", "deepspeed"), "99.0")
)
CPU, MPS = replace(CUDA, device="cpu", gpus=0), replace(CUDA, device="mps", gpus=1)


def recipe(*settings: str) -> Recipe:
    """`a.b=value` items over the shortest recipe; values as in Python, else text."""
    tree: dict[str, Any] = {"model": {"source": "toy"}, "data": {"train": [{"path": "x.jsonl"}]}}
    for setting in settings:
        key, _, raw = setting.partition("=")
        *above, last = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        words = {"true": True, "false": False, "null": None}
        if raw.startswith("["):
            node[last] = raw[1:-1].split()
            continue
        node[last] = words[raw] if raw in words else int(raw) if raw.isdecimal() else raw
    return Recipe.model_validate(tree)


CASES = [
    ("one_process_for_single", ["engine.name=single", "engine.processes=2"], CUDA, {}),
    ("replicas_divide_ranks", ["engine.name=fsdp2", "engine.processes=8", "engine.fsdp2.dp_replicate=3"], replace(CUDA, gpus=8), {}),
    ("parameter_offload_needs_stage_3", ["engine.name=deepspeed", "engine.deepspeed.offload_parameters=cpu"], CUDA, {}),
    ("nvme_offload_needs_stage_3", ["engine.name=deepspeed", "engine.deepspeed.offload_optimizer=nvme", "engine.deepspeed.nvme_path=/x"], CUDA, {}),
    ("nvme_needs_a_folder", ["engine.name=deepspeed", "engine.deepspeed.zero_stage=3", "engine.deepspeed.offload_optimizer=nvme"], CUDA, {}),
    ("deepspeed_keeps_masters", ["engine.name=deepspeed", "optimizer.master_weights=false"], CUDA, {}),
    ("flat_slices_are_not_matrices", ["engine.name=deepspeed", "optimizer.name=muon"], CUDA, {}),
    ("flat_slices_are_not_matrices", ["engine.name=deepspeed", "optimizer.name=adafactor"], CUDA, {}),
    ("flat_states_are_not_quantised", ["engine.name=deepspeed", "optimizer.name=adamw_8bit"], CUDA, {}),
    ("flat_states_are_not_quantised", ["engine.name=deepspeed", "optimizer.name=paged_adamw_8bit"], CUDA, {}),
    ("offloaded_states_are_not_paged", ["engine.name=fsdp2", "engine.fsdp2.cpu_offload=true", "optimizer.name=paged_adamw_8bit"], CUDA, {}),
    ("offloaded_update_is_adam_or_sgd", ["engine.name=deepspeed", "optimizer.name=sgd", "engine.deepspeed.zero_stage=3",
     "engine.deepspeed.offload_optimizer=nvme", "engine.deepspeed.nvme_path=/x"], CUDA, {}),
    ("zero_3_is_not_compiled", ["engine.name=deepspeed", "engine.deepspeed.zero_stage=3", "training.compile=true"], CUDA, {}),
    ("batch_divides", ["engine.processes=2", "training.global_batch_size=9", "training.micro_batch_size=2"], CUDA, {}),
    ("qlora_is_not_for_zero_3", ["method=qlora", "engine.name=deepspeed", "engine.deepspeed.zero_stage=3"], CUDA, {}),
    ("quantised_base_is_frozen", ["method=full"], CUDA, {"dtype": "fp8"}),
    ("adapter_options_need_adapters", ["method=full", "lora.dora=true"], CUDA, {}),
    ("names_of_experts_are_not_adapted", ["method=lora", "lora.targets=[q_proj gate_proj]"], CUDA, {"moe_layers": (0,)}),
    ("names_of_experts_are_not_adapted", ["method=lora", "lora.targets=[shared_expert.up_proj]"], CUDA, {"moe_layers": (0,)}),
    ("paged_states_need_cuda", ["optimizer.name=paged_adamw_8bit"], CPU, {}),
    ("paged_states_need_cuda", ["optimizer.name=paged_adamw_8bit"], MPS, {}),
    ("bitsandbytes_has_no_mps", ["method=qlora"], MPS, {}),
    ("bitsandbytes_has_no_mps", ["optimizer.name=adamw_8bit"], MPS, {}),
    ("attention_kernels_need_cuda", ["model.attention=flex_attention"], CPU, {}),
    ("attention_kernels_need_cuda", ["model.attention=flash_attention_2"], replace(CPU, versions=None), {}),
    ("flash_attention_is_for_16_bits", ["model.attention=flash_attention_2", "training.precision=fp32"], replace(CUDA, versions=None), {}),
    ("ranks_have_a_device_each", ["engine.processes=4"], CUDA, {}),
    ("sharding_needs_a_backend", ["engine.name=fsdp2"], MPS, {}),
    ("bf16_needs_ampere", ["training.precision=bf16"], replace(CUDA, gpu_capability="7.5"), {}),
    ("foreign_code_needs_consent", [], CUDA, {"needs_own_code": True}),
    ("attention_sinks_need_their_kernel", ["model.attention=flash_attention_2"], replace(CUDA, versions=None), {"model_type": "gpt_oss"}),
    ("sequences_within_positions", ["data.sequence_length=256", "data.packing=false"], CUDA, {}),
    ("no_more_recomputed_than_layers", ["training.activation_checkpointing=999"], CUDA, {}),
    ("packages_are_there", ["engine.name=deepspeed"], replace(CUDA, versions={"torch": "2.13", "transformers": "5.24"}), {}),
    ("packages_are_new_enough", [], replace(CUDA, versions={"torch": "2.6.0+cu124", "transformers": "5.24"}), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "settings", "where", "changes"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_what_is_illegal_is_refused_and_the_hint_mends_it(
    rule: str, settings: list[str], where: Situation, changes: dict[str, Any]
) -> None:
    shape = replace(SHAPE, **changes)
    found = problems(recipe(*settings), shape, where)
    assert rule in [p.rule for p in found]
    problem = next(p for p in found if p.rule == rule)
    assert problem.link.startswith("https://") and problem.why
    advice = re.search(r"([a-z0-9_.]+): ([\w.]+)", problem.hint)
    if advice is None:
        assert "pip install" in problem.hint or "to a folder" in problem.hint
        return
    mended = [s for s in settings if not s.startswith(advice[1] + "=")] + [f"{advice[1]}={advice[2]}"]
    assert rule not in [p.rule for p in problems(recipe(*mended), shape, where)]


def test_every_rule_has_a_case() -> None:
    assert {r.__name__ for r in RULES} - {c[0] for c in CASES} <= {
        "fused_experts_stay_in_16_bits",
    }


@pytest.mark.parametrize("settings", [
    [],
    ["method=full", "engine.name=fsdp2", "engine.processes=2", "engine.fsdp2.dp_replicate=2"],
    ["method=qlora", "engine.name=fsdp2", "engine.processes=2"],
    ["method=qlora", "engine.name=deepspeed", "engine.deepspeed.zero_stage=2"],
    ["method=lora", "engine.name=deepspeed", "engine.deepspeed.zero_stage=3", "engine.deepspeed.offload_optimizer=nvme",
     "engine.deepspeed.offload_parameters=nvme", "engine.deepspeed.nvme_path=/x"],
    ["optimizer.name=muon", "engine.name=ddp"],
    ["training.compile=true", "engine.name=deepspeed", "engine.deepspeed.zero_stage=2"],
    ["optimizer.name=muon", "engine.name=fsdp2", "engine.fsdp2.cpu_offload=true"],
    ["optimizer.name=adafactor", "engine.name=fsdp2"],
    ["optimizer.name=adamw_8bit", "engine.name=fsdp2", "engine.fsdp2.cpu_offload=true"],
    ["optimizer.name=paged_adamw_8bit", "engine.name=fsdp2"],
    ["optimizer.name=sgd", "engine.name=deepspeed", "engine.deepspeed.offload_optimizer=cpu"],
    ["training.global_batch_size=8", "training.micro_batch_size=2", "engine.processes=2"],
])  # fmt: skip
def test_what_is_legal_passes(settings: list[str]) -> None:
    assert problems(recipe(*settings), SHAPE, CUDA) == []


def test_all_problems_are_told_at_once() -> None:
    bad = recipe(
        "engine.name=deepspeed", "method=qlora", "engine.deepspeed.zero_stage=3", "optimizer.name=muon"
    )
    with pytest.raises(RuleError) as caught:
        check(bad, SHAPE, CUDA)
    assert "2 rules" in caught.value.what and caught.value.exit_code == 2
    assert "ZeRO-3 does not split 4-bit weights" in caught.value.why and "muon" in caught.value.why


def test_what_is_not_known_is_not_refused() -> None:
    assert problems(recipe("optimizer.name=paged_adamw_8bit", "engine.processes=64"), None, Situation()) == []


def test_the_situation_is_found_without_importing_anything_heavy() -> None:
    import subprocess
    import sys

    code = "import sys; from shardwise.rules import situation; print(situation().versions); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout
    assert situation().lacks("no-such-package")
