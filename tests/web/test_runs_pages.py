"""Runs on the page: their .json twins, what is sent of long ones, and that nobody's text acts."""

import gzip
import http.client
import json
import os
import re
import time
from pathlib import Path

import pytest
from made_runs import HOSTILE
from served_page import TOKEN, Page

from shardwise.recipe import parse_recipe
from shardwise.runs import create_run
from shardwise.web.library import Library
from shardwise.web.runs_pages import again


def get(site: Page, path: str, zipped: bool = False) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    if zipped:
        headers["Accept-Encoding"] = "gzip"
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, found


@pytest.mark.parametrize(
    "path",
    ["/runs", "/runs/first", "/compare?run=first&run=second", "/start?from=first", "/plan?count=4", "/data"],
)
def test_every_page_has_a_json_twin(site: Page, path: str) -> None:
    way, _, question = path.partition("?")
    status, text = get(site, path)
    assert status == 200 and text.startswith(b"<!doctype html>")
    status, text = get(site, f"{way}.json" + (f"?{question}" if question else ""))
    assert status == 200 and json.loads(text)


def test_pages_tell_the_same_numbers_as_the_command(site: Page) -> None:
    found = json.loads(get(site, "/runs/first.json")[1])
    assert (found["evaluation_before"], found["evaluation_after"]) == (3.31, 2.62)
    page = get(site, "/runs/first")[1].decode()
    assert "3.3100" in page and "740 MiB" in page and "+0.0 %" in page and "-4.6 %" in page


def test_errors_are_pages_and_json_with_the_same_words(site: Page) -> None:
    status, text = get(site, "/runs/nobody")
    assert status == 404 and b"no run &#39;nobody&#39;" in text
    status, text = get(site, "/runs/nobody.json")
    assert status == 404 and json.loads(text)["error"] == "no run 'nobody'"
    assert get(site, "/compare?" + "&".join(f"run=r{i}" for i in range(9)))[0] == 400


def test_compare_names_the_keys_in_which_recipes_differ(site: Page) -> None:
    page = get(site, "/compare?run=first&run=second")[1].decode()
    assert re.search(r"<code>lora\.rank</code></th><td>8</td><td>16</td>", page)
    assert "lora.alpha" not in page


def test_hostile_text_stays_text(site: Page) -> None:
    for path in ("/runs", "/runs/hostile", "/compare?run=first&run=hostile", "/start?from=hostile"):
        page = get(site, path)[1].decode()
        assert "<script>alert" not in page and "<img src=x" not in page, path
    data = re.search(r'id="run-data">(.+?)</script>', get(site, "/runs/hostile")[1].decode(), re.DOTALL)
    assert data and HOSTILE in json.loads(data[1])["warnings"][0]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 steps with one spike, as lines of real length."""
    folder = tmp_path_factory.mktemp("long")
    run = create_run(folder, "long", "model: tiny\ndata: rows.jsonl\n", {})
    lines = [
        f'{{"kind":"step","time":1.0,"step":{i},'
        f'"loss":{99.5 if i == 54321 else 2 + 1 / (1 + i / 1000) + (i * 7919 % 1000) / 5000},'
        f'"learning_rate":{2e-4 * (1 - i / 1e5)},"grad_norm":{0.5 + (i * 104729 % 1000) / 1000},"tokens":4096,'
        f'"trained_tokens":2000,"seconds":0.5,"tokens_per_second":{8000 + i % 97},"allocated_bytes":123456789,'
        f'"peak_allocated_bytes":223456789,"resident_bytes":323456789}}'
        for i in range(1, 100_001)
    ]
    run.events_path.write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_of_100000_steps_is_sent_thinned_with_its_spike(long_run: Path) -> None:
    site = Page(Library(long_run))
    try:
        status, zipped = get(site, "/runs/long/live.json", zipped=True)
        assert status == 200 and len(zipped) < 40_000
        told = json.loads(gzip.decompress(zipped))
        assert len(told["series"]["step"]) <= 600 and told["series"]["steps_total"] == 100_000
        assert max(told["series"]["loss"]) == 99.5
        began = time.perf_counter()
        assert get(site, f"/runs/long/live.json?seen={told['seen']}") == (204, b"")
        assert time.perf_counter() - began < 0.5  # nothing new costs nothing, whatever the length
        with (long_run / "long" / "events.jsonl").open("a") as file:
            file.write('{"kind":"step","step":100001,"loss":1.0}\n')
        told = json.loads(get(site, f"/runs/long/live.json?seen={told['seen']}")[1])
        assert told["series"]["step"][-1] == 100_001
    finally:
        site.close()


def test_log_shows_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    run = create_run(tmp_path, "one", "model: tiny\ndata: rows.jsonl\n", {})
    run.logs_path.mkdir()
    (run.logs_path / "rank-0.log").write_bytes(b"loading\n 10%\r 50%\r100%\nend\n")
    site = Page(Library(tmp_path))
    try:
        told = json.loads(get(site, "/runs/one/log.json?name=rank-0.log")[1])
        assert told["text"] == "loading\n100%\nend\n"
    finally:
        site.close()


def test_training_again_takes_a_new_name() -> None:
    text = again("model: tiny\ndata: rows.jsonl\nlora: {rank: 4}\nrun: {name: taken}\n")
    recipe = parse_recipe(text)
    assert recipe.run.name is None and recipe.lora.rank == 4
    assert again("model: tiny  # as written\ndata: x\n") == "model: tiny  # as written\ndata: x\n"


def test_a_name_taken_again_shows_the_new_run(tmp_path: Path) -> None:
    library = Library(tmp_path)
    first = create_run(tmp_path, "one", "model: tiny\ndata: rows.jsonl\n", {})
    first.event("step", step=1, loss=1.0)
    assert library.view(first, 10).series.loss == (1.0,)
    os.utime(first.recipe_path, (1, 1))
    assert library.view(first, 10).series.loss == (1.0,)
    first.discard()
    second = create_run(tmp_path, "one", "model: tiny\ndata: rows.jsonl\n", {})
    for step in (1, 2):
        second.event("step", step=step, loss=2.0)
    assert library.view(library.run("one"), 10).series.loss == (2.0, 2.0)


def test_list_of_runs_tells_running_and_finished_ones(site: Page, made: Path) -> None:
    rows = {row["name"]: row for row in json.loads(get(site, "/runs.json")[1])}
    assert rows["first"]["peak_allocated_bytes"] == 740 * 2**20 and rows["first"]["steps"] == 40
    assert rows["second"]["state"] == "interrupted"
