"""The Plan page: the same answer as the command, fast, and nobody else's text in it."""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest
from served_page import Page
from test_runs_pages import get

from shardwise.errors import UsageError
from shardwise.recipe import parse_recipe
from shardwise.web.library import Library
from shardwise.web.pages import page
from shardwise.web.plan_pages import PlanPages
from shardwise.web.plan_question import Controls, Sources, ask, command_of, flag_as_change, read_controls
from shardwise.web.plan_view import scatter, stack_rows

LLAMA = "meta-llama/Llama-3.1-8B"


def test_command_of_a_question_gives_the_same_answer(site: Page) -> None:
    query = {"model": LLAMA, "gpu": "A100-80GB", "count": "2", "sequence_length": "4096", "tokens": "3M",
             "micro_batch_size": "2", "activation_checkpointing": "full", "rank": "8", "method": "lora",
             "epochs": "2", "budget": "900usd"}  # fmt: skip
    told = json.loads(get(site, f"/plan.json?{urlencode(query)}")[1])
    words = shlex.split(told["command"])
    assert words[:2] == ["shardwise", "plan"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main", *words[1:], "--json"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    command = json.loads(done.stdout)
    assert command["recommendation"] == told["recommendation"]
    assert command["options"] == told["options"]
    recipe = parse_recipe(told["recipe"])
    assert (recipe.method, recipe.lora.rank, recipe.training.micro_batch_size) == ("lora", 8, 2)


@pytest.mark.parametrize("query", [{"gpu": "any", "method": "lora"}, {"gpu": "any", "deadline": "2h"}])
def test_command_over_the_catalogue_gives_the_same_answer(query: dict[str, str]) -> None:
    """Also on a machine with GPUs of its own, which a plan without --gpus would be for."""
    controls = Controls(**query)
    words = shlex.split(command_of(controls))
    assert words[words.index("--gpus") + 1] == "any"
    told = PlanPages(Library(Path("nowhere")))._json(controls)
    from click.testing import CliRunner

    from shardwise.cli.plan import plan

    done = CliRunner().invoke(plan, [*words[2:], "--json"], catch_exceptions=False)
    command = json.loads(done.stdout)
    assert command["recommendation"] == told["recommendation"]
    assert command["options"][: len(told["options"])] == told["options"]


def test_an_id_outside_the_catalogue_is_asked_of_the_hub_and_never_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shardwise.facts.catalogue import catalogue_shape
    from shardwise.web import plan_question

    asked = []

    def hub(source: str) -> object:
        asked.append(source)
        return replace(catalogue_shape(LLAMA), source=source)  # type: ignore[type-var]

    monkeypatch.setattr(plan_question, "read_hub_model", hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody" / "model").mkdir()  # a folder of that name is not what the id means
    assert ask(Controls(model="somebody/model"), Sources()).question.shape.source == "somebody/model"
    assert asked == ["somebody/model"]
    for path in ("/etc/model", "./model", "~/model", "a/b/c", "nothing-like-it"):
        with pytest.raises(UsageError):
            ask(Controls(model=path), Sources())
    assert asked == ["somebody/model"]


def test_link_holds_exactly_what_was_changed() -> None:
    controls = Controls(method="qlora", count="1")
    query = urlencode(controls.changed())
    assert query == "method=qlora&count=1"
    assert read_controls(dict(parse_qsl(query))) == controls


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"sequence_length": "-1"}, "sequence_length"),
        ({"sequence_length": "1e3"}, "sequence_length"),
        ({"count": "9"}, "9xH100-80GB"),
        ({"gpu": "H1000"}, "H1000"),
        ({"model": "nobody/nothing"}, "nobody/nothing"),
        ({"model": "/etc"}, "/etc"),
        ({"method": "lorra"}, "lorra"),
        ({"tokens": "many"}, "many"),
        ({"budget": "a lot"}, "a lot"),
        ({"data": "/etc/passwd"}, "/etc/passwd"),
        ({"epochs": "nan"}, "nan"),
        ({"rank": "0"}, "rank"),
        ({"activation_checkpointing": "some"}, "some"),
        ({"micro_batch_size": "0"}, "micro_batch_size"),
    ],
)
def test_what_cannot_be_asked_is_told_and_is_no_crash(site: Page, query: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        ask(Controls(**query), Sources())
    status, text = get(site, f"/plan?{urlencode(query)}")
    assert status == 200 and said in text.decode() and "root:" not in text.decode()
    status, text = get(site, f"/plan.json?{urlencode(query)}")
    assert status in (400, 404) and said in json.loads(text)["error"]


def test_misspelt_control_is_refused_not_ignored(site: Page) -> None:
    status, text = get(site, "/plan.json?sequence_lenght=9")
    assert status == 404 and "sequence_length" in json.loads(text)["hint"]


def test_text_in_the_address_cannot_act(site: Page) -> None:
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    for control in ("model", "count", "tokens", "micro_batch_size", "gpu", "data"):
        for path in ("/plan", "/plan/answer", "/plan/scatter"):
            text = get(site, f"{path}?{urlencode({control: hostile})}")[1].decode()
            assert "<script>alert" not in text and "<img" not in text, (control, path)


def test_bars_share_a_scale_and_a_card_ends_where_it_must() -> None:
    answer = ask(
        Controls(model="meta-llama/Llama-3.1-70B", method="full", gpu="H100-80GB", count="8"), Sources()
    )
    rows = stack_rows(answer)
    fitting = [r for r in rows if r.verdict != "does not fit"]
    over = [r for r in rows if r.verdict == "does not fit" and not r.reason]
    assert fitting and over
    assert len({r.capacity_percent for r in rows}) == 1
    for row in rows:
        assert sum(t.bytes for t in row.terms) == row.needed_bytes
        end = row.bar.segments[-1].start + row.bar.segments[-1].width
        assert end == pytest.approx(row.needed_bytes / row.capacity_bytes * row.capacity_percent, rel=0.01)
    assert all(r.needed_bytes <= r.capacity_bytes for r in fitting)
    assert all(r.needed_bytes > r.capacity_bytes for r in over)


def test_front_is_drawn_from_dear_and_fast_to_cheap_and_slow() -> None:
    graph = scatter(ask(Controls(gpu="any"), Sources()))
    assert graph is not None and len(graph.front) >= 2
    xs, ys = [p.x for p in graph.front], [p.y for p in graph.front]
    assert xs == sorted(xs) and ys == sorted(ys)  # to the right and down: y grows downwards
    assert all(0 <= p.x <= 100 and 0 <= p.y <= 100 for p in graph.points)
    assert {p.option.plan.stack.method for p in graph.points} >= {"lora", "qlora"}


def test_without_data_there_is_no_scatter_but_bars() -> None:
    answer = ask(Controls(tokens=""), Sources())
    assert scatter(answer) is None and stack_rows(answer)


def test_changes_the_planner_proposes_are_links() -> None:
    assert flag_as_change("--method qlora") == {"method": "qlora"}
    assert flag_as_change("--gpus 32xH100-80GB") == {"count": "32", "gpu": "H100-80GB"}
    assert flag_as_change("--sequence-length 512") == {"sequence_length": "512"}
    assert flag_as_change("--something else") == {}


def seconds_of_cpu(pages: PlanPages, controls: Controls) -> tuple[float, int]:
    """What an answer with its HTML costs, and over how many candidates."""
    began = time.process_time()
    found = pages._answer(controls)
    page("plan_answer.html", c=controls, **found)
    return time.process_time() - began, found["answer"].tried


def test_a_control_is_answered_in_under_100_ms_over_5000_candidates() -> None:
    pages = PlanPages(Library(Path("nowhere")))
    whole = {"gpu": "any", "model": "Qwen/Qwen2.5-7B"}
    seconds_of_cpu(pages, Controls(**whole))  # the first question over the catalogue, a second or so
    for change in ({"tokens": "30M"}, {"budget": "50usd"}, {"deadline": "3h"}, {"epochs": "3"}):
        took, tried = seconds_of_cpu(pages, Controls(**{**whole, **change}))
        assert tried > 5000
        assert took < 0.1, change


def test_a_new_model_over_the_catalogue_is_answered_in_under_100_ms_per_5000_candidates() -> None:
    """The best of three models nobody asked for before; CI's processors are slower than a desk's."""
    pages = PlanPages(Library(Path("nowhere")))
    seconds_of_cpu(pages, Controls(gpu="any", method="lora"))
    found = [
        seconds_of_cpu(pages, Controls(gpu="any", method="lora", model=model))
        for model in ("Qwen/Qwen3-8B", "Qwen/Qwen2.5-3B", "microsoft/phi-4")
    ]
    assert all(tried > 5000 for _, tried in found)
    assert min(took / tried * 5000 for took, tried in found) < 0.1


def test_a_new_length_or_model_on_a_chosen_card_is_answered_in_under_200_ms() -> None:
    pages = PlanPages(Library(Path("nowhere")))
    seconds_of_cpu(pages, Controls())
    for change in (
        {"sequence_length": "8192"},
        {"model": "meta-llama/Llama-3.1-70B"},
        {"micro_batch_size": "4"},
    ):
        took, _ = seconds_of_cpu(pages, Controls(**change))
        assert took < 0.2, change  # half of it here; CI's processors are slower
