"""Tables of measured runs: what is read, declined and compared."""

import csv
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.facts.catalogue import catalogue_shape
from shardwise.plan.accuracy import percentile90, score_memory, score_throughput
from shardwise.plan.rows import parse_row, read_rows, targets_of

ROW = {
    "id": "a-1", "source": "s", "model": "Llama-3-8B", "method": "full", "sharding": "FSDP2",
    "sharding_norm": "zero3", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "num_gpus": "64",
    "gpus_per_node": "8", "gpu_kind": "A100-80GB", "micro_batch_per_gpu": "1", "seq_len": "8192",
    "seq_kind": "packed", "grad_accum": "1", "act_ckpt": "selective-op", "attention": "sdpa-flash",
    "compile": "no", "fused_ce": "no", "precision": "bf16", "param_dtype": "fp32 (sharded)",
    "optimizer": "AdamW", "quant": "none", "cpu_offload": "none", "outcome": "ok", "measured_peak_mem_GB": "60",
    "mem_unit": "GiB", "mem_kind": "torch max_memory_reserved", "mem_usable": "yes",
    "tokens_per_s_per_gpu": "2973", "tput_usable": "yes",
}  # fmt: skip


def table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_becomes_a_stack() -> None:
    row = parse_row(ROW)
    assert row.declined == ""
    assert row.stack is not None
    assert (row.stack.sharding, row.stack.world_size, row.stack.sequence_length) == ("fsdp2", 64, 8192)
    assert row.stack.activation_checkpointing == "selective"
    assert row.measured_bytes == 60 * 2**30
    assert row.memory_kind == "reserved"


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("tp", "8", "tensor parallelism"),
        ("pp", "2", "pipeline parallelism"),
        ("precision", "fp8-rowwise", "fp8"),
        ("model", "Nobody-1B", "not in the catalogue"),
        ("gpu_kind", "Z9", "not in the catalogue"),
        ("seq_len", "", "seq_len is empty"),
    ],
)
def test_what_is_not_estimated_is_declined_with_its_reason(column: str, value: str, reason: str) -> None:
    assert reason in parse_row(ROW | {column: value}).declined


@pytest.mark.parametrize(
    ("sharding", "norm", "gpus", "expected"),
    [("none", "none", "1", ("single", 1)), ("HSDP", "hsdp", "64", ("fsdp2", 8)), ("DDP", "ddp", "8", ("ddp", 1)),
     ("ZeRO-2", "zero2", "8", ("zero2", 1)), ("DDP (FSDP NO_SHARD)", "ddp", "2", ("ddp", 1))],
)  # fmt: skip
def test_sharding_words(sharding: str, norm: str, gpus: str, expected: tuple[str, int]) -> None:
    stack = parse_row(ROW | {"sharding": sharding, "sharding_norm": norm, "num_gpus": gpus}).stack
    assert stack is not None
    assert (stack.sharding, stack.dp_replicate) == expected


def test_adapter_targets_are_translated_to_the_family_s_names() -> None:
    llama, falcon = catalogue_shape("meta-llama/Llama-3.1-8B"), catalogue_shape("tiiuae/falcon-7b")
    assert llama is not None
    assert falcon is not None
    assert targets_of("q,v", llama) == ("q_proj", "v_proj")
    assert targets_of("q,k,v,mlp", llama) == (
        "down_proj",
        "gate_proj",
        "k_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    )
    assert targets_of("q,v or fused qkv", falcon) == ("query_key_value",)
    assert targets_of("all-linear", llama) == "all-linear"


def test_errors_are_scored_and_declined_rows_listed(tmp_path: Path) -> None:
    rows = read_rows(
        table(tmp_path / "t.csv", ROW, ROW | {"id": "b", "tp": "8"}, ROW | {"id": "c", "tput_usable": "no"})
    )
    score = score_throughput(rows)
    assert [c.row.id for c in score.compared] == ["a-1"]
    assert [row.id for row, _ in score.declined] == ["b"]
    assert score.median_absolute is not None
    assert score.median_absolute < 0.15
    memory = score_memory(rows)
    assert memory.median_absolute is not None


def test_an_out_of_memory_row_is_scored_as_a_bound(tmp_path: Path) -> None:
    huge = ROW | {"outcome": "oom", "mem_usable": "bound", "micro_batch_per_gpu": "64", "act_ckpt": "none"}
    score = score_memory(read_rows(table(tmp_path / "t.csv", huge)))
    assert score.compared == ()
    assert [o.passed for o in score.out_of_memory] == [True]


def test_the_ninetieth_percentile_is_a_value_of_the_list() -> None:
    assert percentile90([float(i) for i in range(1, 11)]) == 9
    assert percentile90([5.0]) == 5.0


@pytest.mark.parametrize(("content", "message"), [("", "no rows"), ("a,b\n1,2\n", "no column")])
def test_another_table_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_rows(file)
    assert message in caught.value.why


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_rows(tmp_path / "none.csv")
