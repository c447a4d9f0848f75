"""Odd spellings in a table of measured runs are read, and nothing in a cell stops the score."""

import csv
import random
from pathlib import Path

import pytest
from test_rows import ROW

from shardwise.plan.accuracy import score_memory, score_throughput
from shardwise.plan.cells import clean, gpu_spellings, number, whole
from shardwise.plan.rows import parse_row

TABLE = Path(__file__).parent / "inputs" / "measured_runs.csv"


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("2,048 tokens", 2048),
        ("4k", 4096),
        ("~16.5", 16.5),
        ("8x", 8),
        ("", None),
        ("unknown", None),
        ("7B", 7),
    ],
)
def test_the_number_in_a_cell(cell: str, expected: float | None) -> None:
    assert number(cell) == expected


def test_nodes_times_gpus_is_a_count() -> None:
    assert whole("2x8") == 16
    assert whole("8 GPUs") == 8


@pytest.mark.parametrize(
    ("cells", "column", "expected"),
    [
        ({"method": "QLoRA (4-bit)"}, "method", "qlora"),
        ({"method": "LoRA", "quant": "bnb int8"}, "method", "qlora"),
        ({"method": "Full fine-tuning"}, "method", "full"),
        ({"method": "DoRA"}, "method", "lora"),
        ({"sharding": "DeepSpeed ZeRO Stage 3"}, "sharding", "ZeRO-3"),
        ({"sharding": "zero2", "sharding_norm": ""}, "sharding_norm", "zero2"),
        ({"sharding": "fsdp v2"}, "sharding", "FSDP2"),
        ({"sharding": "FSDP-1 FULL_SHARD"}, "sharding", "FSDP1 FULL_SHARD"),
        ({"sharding": "DDP (FSDP NO_SHARD)"}, "sharding", "DDP (FSDP NO_SHARD)"),
        ({"act_ckpt": "True"}, "act_ckpt", "full"),
        ({"act_ckpt": "off"}, "act_ckpt", "none"),
        ({"act_ckpt": "unstated (SAC or none)"}, "act_ckpt", "unstated (sac or none)"),
        ({"compile": "TRUE"}, "compile", "yes"),
        ({"outcome": "CUDA out of memory"}, "outcome", "oom"),
        (
            {"micro_batch_per_gpu": "128 (global)", "num_gpus": "8", "grad_accum": "4"},
            "micro_batch_per_gpu",
            "4",
        ),
        ({"precision": "BF16 mixed"}, "precision", "bf16 mixed"),
    ],
)
def test_spellings(cells: dict[str, str], column: str, expected: str) -> None:
    assert clean(ROW | cells)[column] == expected


@pytest.mark.parametrize(
    "name", ["NVIDIA A100 80GB PCIe", "8xA100-80GB", "A100-SXM4-80GB", "2 x A100 (80GB)"]
)
def test_gpus_are_known_under_other_names(name: str) -> None:
    gpu = parse_row(ROW | {"gpu_kind": name, "gpu_mem_gb": "80"}).gpu
    assert gpu is not None
    assert gpu.name == "A100-80GB"
    assert gpu_spellings("") == []


def test_alpaca_that_is_not_packed_is_as_long_as_its_longest_record() -> None:
    row = parse_row(ROW | {"model": "Llama-2-7B", "seq_len": "", "seq_kind": "unpacked alpaca"})
    assert row.stack is not None
    assert row.stack.sequence_length == 1304
    row = parse_row(ROW | {"seq_len": "512", "seq_kind": "unpacked, cap 512", "notes": "HF Alpaca"})
    assert row.stack is not None
    assert row.stack.sequence_length == 512


def test_no_cell_stops_the_score() -> None:
    words = ["", "?", "n/a", "-1", "0", "1e9", "2x8", "8 (global)", "nan", "bnb int8", "zero-2", "FSDP", "selective",
             "99999999999", "GaLore", "true", "Z9", "\u00e9"]  # fmt: skip
    with TABLE.open(newline="") as file:
        table = list(csv.DictReader(file))
    dice = random.Random(4)
    needed = ("id", "model", "method", "sharding", "num_gpus", "gpu_kind", "micro_batch_per_gpu", "seq_len")
    rows = []
    for _ in range(150):
        line = dict(dice.choice(table))
        for column in dice.sample(sorted(line), 3):
            line[column] = dice.choice(words)
        rows.append(parse_row(line | {n: line.get(n, "") for n in needed}))
    memory, speed = score_memory(rows), score_throughput(rows)
    assert memory.compared
    assert speed.compared
    assert all(reason for _, reason in (*memory.declined, *speed.declined))
