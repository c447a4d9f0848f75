"""What changed since a checkpoint: told, refused, or accepted by name (case C12)."""

from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.runs.changes import check, compare, facts


def made(**changes: Any) -> dict[str, Any]:
    """Facts of one run; `changes` by dotted key with __ for the dot."""
    tree: dict[str, Any] = {
        "recipe": {
            "method": "full",
            "lora": {"rank": 8},
            "optimizer": {"learning_rate": 1e-3, "name": "adamw"},
            "training": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 12},
            "engine": {"name": "fsdp2", "processes": 2},
        },
        "data": {"rows": "aa", "held_out": "bb"},
        "model": {"weights": "cc"},
        "versions": {"torch": "2.13", "deepspeed": "0.19", "python": "3.11.7"},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        place = tree["recipe"] if section in tree["recipe"] else tree
        place[section] = {**place[section], name: value}
    return facts(tree["recipe"], *tree["data"].values(), tree["model"]["weights"], tree["versions"])


def test_nothing_changed_is_nothing_told() -> None:
    assert compare(made(), made()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"engine__name": "ddp"},
        {"engine__processes": 1},
        {"training__micro_batch_size": 1},
        {"versions__python": "3"},
    ],
)
def test_layout_may_change_and_is_told(change: dict[str, Any]) -> None:
    changes = compare(made(), made(**change))
    assert [c.kind for c in changes] == ["layout"]
    check(changes, (), 8)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"optimizer__learning_rate": 5e-4}, "optimizer.learning_rate", "was 0.001, is 0.0005"),
        ({"training__max_steps": 24}, "training.max_steps", "was 12, is 24"),
        ({"data__rows": "zz"}, "data.rows", "was aa, is zz"),
        ({"model__weights": "zz"}, "model.weights", "was cc, is zz"),
        ({"versions__torch": "2.14"}, "versions.torch", "was 2.13, is 2.14"),
    ],
)
def test_c12_what_changes_the_numbers_is_refused_until_accepted_by_name(
    change: dict[str, Any], field: str, text: str
) -> None:
    changes = compare(made(), made(**change))
    with pytest.raises(UsageError) as caught:
        check(changes, (), 8)
    assert f"{field} {text}" in str(caught.value) and f"--accept {field}" in caught.value.hint
    check(changes, (field,), 8)


def test_c12_one_override_accepts_one_field() -> None:
    changes = compare(made(), made(optimizer__learning_rate=5e-4, data__rows="zz"))
    with pytest.raises(UsageError, match=r"data\.rows was aa, is zz") as caught:
        check(changes, ("optimizer.learning_rate",), 8)
    assert "learning_rate" not in str(caught.value)


def test_c12_a_batch_of_another_size_gives_the_step_count_another_meaning() -> None:
    changes = compare(made(), made(training__global_batch_size=2))
    with pytest.raises(UsageError, match="was 4, is 2") as caught:
        check(changes, ("training.global_batch_size",), 8)
    assert "back to 4" in caught.value.hint


def test_accepting_what_has_not_changed_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="has not changed"):
        check([], ("optimizer.learning_rate",), 8)


def test_what_a_run_does_not_use_may_change() -> None:
    assert compare(made(), made(lora__rank=16, versions__deepspeed="0.20")) == []
    zero = made(engine__name="deepspeed")
    changed = compare(zero, made(engine__name="deepspeed", versions__deepspeed="0.20"))
    assert [c.field for c in changed] == ["versions.deepspeed"]
