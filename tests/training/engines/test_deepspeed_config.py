"""The generated configuration: every value from the recipe, read back, no key lost (G03)."""

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import RuleError, RunError
from shardwise.recipe import Recipe, parse_recipe
from shardwise.training.engines.deepspeed_config import compare, deepspeed_config

HEAD = "model: toy\ndata: rows.jsonl\n"


def recipe(deepspeed: str = "", rest: str = "") -> Recipe:
    return parse_recipe(
        f"{HEAD}training: {{micro_batch_size: 2, global_batch_size: 16, precision: bf16}}\n"
        f"engine: {{name: deepspeed, device: cpu, processes: 2, deepspeed: {{{deepspeed}}}}}\n{rest}"
    )


def config(deepspeed: str = "", rest: str = "", **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "world_size": 2,
        "accumulation_steps": 4,
        "trained": 1000,
        "elements": 5000,
        "largest": 700,
        "pin_memory": False,
    }
    return deepspeed_config(recipe(deepspeed, rest), **{**defaults, **options})


def test_g03_batch_and_clipping_have_one_source() -> None:
    found = config()
    assert found["train_batch_size"] == 16 == 2 * 4 * 2
    assert found["train_micro_batch_size_per_gpu"] == 2 and found["gradient_accumulation_steps"] == 4
    assert found["gradient_clipping"] == 1.0
    assert "optimizer" not in found and "scheduler" not in found  # ours to decide, nowhere else


def test_no_clipping_is_written_out_too() -> None:
    assert config(rest="optimizer: {max_grad_norm: null}")["gradient_clipping"] == 0.0


def test_gradients_are_summed_in_fp32_over_ranks_and_micro_batches() -> None:
    assert config()["communication_data_type"] == "fp32"
    assert config()["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config(accumulation_steps=1)["data_types"] == {"grad_accum_dtype": "bf16"}


def test_buckets_are_never_larger_than_their_content() -> None:
    zero = config("zero_stage: 3, reduce_bucket_size: 500000000")["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1000 and zero["stage3_prefetch_bucket_size"] == 5000
    assert config("reduce_bucket_size: 10")["zero_optimization"]["reduce_bucket_size"] == 10


def test_offload_is_written_with_its_place() -> None:
    zero = config("zero_stage: 3, offload_optimizer: nvme, offload_parameters: cpu, nvme_path: /disk")[
        "zero_optimization"
    ]
    assert zero["offload_optimizer"]["device"] == "nvme" and zero["offload_optimizer"]["nvme_path"] == "/disk"
    assert zero["offload_param"]["device"] == "cpu" and "nvme_path" not in zero["offload_param"]
    with pytest.raises(RuleError, match="nvme"):
        config("zero_stage: 3, offload_optimizer: nvme")


@pytest.fixture
def live() -> Any:
    """DeepSpeed's own reading of a configuration, without starting anything."""
    reader = pytest.importorskip("deepspeed.runtime.config")
    return lambda asked: reader.DeepSpeedConfig(dict(asked))


def parts(stage: int) -> str:
    return {
        1: "zero_stage: 1",
        2: "zero_stage: 2, offload_optimizer: cpu",
        3: "zero_stage: 3, offload_optimizer: nvme, offload_parameters: nvme, nvme_path: /disk",
    }[stage]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_reads_every_value_as_it_was_written(stage: int, live: Any) -> None:
    asked = config(parts(stage), world_size=1, accumulation_steps=8)
    compare(asked, live(asked))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("gradient_clipping",), 7.0),
        (("zero_optimization", "reduce_bucket_size"), 77),
        (("bf16", "check_grad_overflow"), False),
        (("data_types", "grad_accum_dtype"), "bf16"),
        (("zero_optimization", "offload_optimizer", "device"), "none"),
        (("aio", "queue_depth"), 99),
    ],
)
def test_a_value_that_did_not_arrive_is_an_error(path: tuple[str, ...], value: Any, live: Any) -> None:
    asked = config(parts(2), world_size=1, accumulation_steps=8)
    read = live(asked)
    node = asked
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(RunError) as caught:
        compare(asked, read)
    assert path[-1] in caught.value.why


def test_a_misspelt_key_cannot_pass(live: Any) -> None:
    asked = config(parts(2), world_size=1, accumulation_steps=8) | {"gradient_cliping": 1.0}
    with pytest.raises(RunError, match="configuration") as caught:
        compare(asked, live(asked))
    assert "gradient_cliping: asked 1.0, found nothing" in caught.value.why


def test_compare_knows_different_spellings_of_one_value() -> None:
    import torch

    live = SimpleNamespace(
        float16_config=_section({}), bfloat16_config=_section({}), zero_config=_section({}), aio_config={},
        grad_accum_dtype="fp32", communication_data_type=torch.float32, train_batch_size=16,
    )  # fmt: skip
    compare({"communication_data_type": "fp32", "train_batch_size": 16}, live)


def _section(values: dict[str, Any]) -> Any:
    return SimpleNamespace(model_dump=lambda **_: values)
