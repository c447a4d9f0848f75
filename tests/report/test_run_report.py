"""What is told of a run, as text, JSON and HTML."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from made_runs import HOSTILE, MIB, fill
from rich.console import Console

from shardwise.cli.main import main
from shardwise.report.run_html import run_bars, run_html, script_hash
from shardwise.report.run_json import run_json
from shardwise.report.run_text import print_run
from shardwise.report.run_view import view_run
from shardwise.runs import RunFolder, create_run


def as_text(run: RunFolder, width: int = 80, colour: bool = False) -> str:
    out = StringIO()
    print_run(Console(file=out, width=width, force_terminal=colour, highlight=False), view_run(run))
    return out.getvalue()


def test_estimate_stands_beside_measured_with_its_error(done: RunFolder) -> None:
    rows = {r.name: r for r in view_run(done).memory}
    assert rows["activations"].difference == pytest.approx((310 - 325) / 325)
    text = as_text(done)
    assert re.search(r"activations +310 MiB +325 MiB +-4\.6 %", text)
    assert re.search(r"peak of live tensors +725 MiB +740 MiB +-2\.0 %", text)
    assert re.search(r"training time +1 min 10 s +1 min 20 s +-12\.5 %", text)
    assert re.search(r"held-out rows +3\.3100 +2\.6200 +-20\.8 %", text)


def test_text_fits_80_columns_but_never_breaks_a_path_or_a_command(done: RunFolder) -> None:
    lines = as_text(done).splitlines()
    body = lines[: lines.index(next(line for line in lines if line.startswith("files")))]
    assert max(len(line) for line in body) <= 80
    assert any(line.endswith(f"shardwise chat {done.path}") for line in lines)
    assert any(line.rstrip().endswith(str(done.events_path)) for line in lines)


def test_answers_stand_side_by_side(done: RunFolder) -> None:
    assert re.search(r"Sure! This function.* Return the sum of a and b\.", as_text(done))


def test_unknown_numbers_are_a_dash_never_zero(tmp_path: Path) -> None:
    run = create_run(tmp_path, "new", "model: tiny\ndata: x\n", {})
    run.event("start", steps=9)
    run.event("step", step=1, loss=3.0)
    text = as_text(run)
    assert "1 of 9 steps" in text and "running" in text
    assert re.search(r"held-out rows +- +- +-", text)
    assert run_json(view_run(run))["peak_allocated_bytes"] is None


def test_text_of_others_does_not_steer_the_terminal(hostile: RunFolder) -> None:
    text = as_text(hostile)
    assert "\x1b" not in text and "\x07" not in text
    assert "[2J" in text  # shown, not obeyed


def test_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    run = fill(create_run(tmp_path, "half", "model: tiny\ndata: x\n", {}), state="interrupted")
    assert "--resume" not in as_text(run)  # nothing to go on from
    checkpoint = run.checkpoint_path(10)
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete").touch()
    assert f"shardwise train --resume {run.path}" in as_text(run)


def test_json_is_whole_and_in_base_units(done: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", str(done.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["peak_allocated_bytes"] == 740 * MIB
    assert len(found["series"]["step"]) == len(found["series"]["loss"]) == 40
    assert found["evaluations"][0]["loss"] == 3.31
    assert {row["name"] for row in found["memory"]} >= {"weights", "peak allocated"}


def test_runs_lists_every_run(done: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "--folder", str(done.path.parent)])
    assert re.search(r"tiny +done +40 +3\.31 > 2\.62 +740 MiB +1 min 35 s", capsys.readouterr().out)
    main(["runs", "--folder", str(done.path.parent), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["name"] == "tiny"


def test_no_runs_is_said_and_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "--folder", str(tmp_path)])
    captured = capsys.readouterr()
    assert captured.out == "" and "no runs" in captured.err
    main(["runs", "--folder", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out) == []


def test_unknown_run_is_exit_2(done: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", "tinny", "--folder", str(done.path.parent)])
    assert caught.value.code == 2
    assert "did you mean tiny" in capsys.readouterr().err


def test_report_in_a_folder_that_does_not_exist_is_exit_2(
    done: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", str(done.path), "--html", str(tmp_path / "none" / "r.html")])
    assert caught.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


class _Page(HTMLParser):
    """Scripts, addresses and event attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[str | None, str]] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.tags: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        self.tags.append(tag)
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append((fields.get("type"), ""))
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action")]
        self.handlers += [k for k in fields if k.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)


def test_html_stands_alone_and_allows_only_its_own_scripts(done: RunFolder) -> None:
    html = run_html(view_run(done))
    page = _Page()
    page.feed(html)
    assert page.addresses == [] and "@import" not in html and "url(" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy and policy[1].startswith("default-src 'none'")
    scripts = [text for kind, text in page.scripts if kind is None]
    assert len(scripts) == 3
    for text in scripts:
        assert script_hash(text) in policy[1]
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]


def test_html_defuses_text_of_others(hostile: RunFolder) -> None:
    html = run_html(view_run(hostile))
    page = _Page()
    page.feed(html)
    assert len(page.scripts) == 4 and "img" not in page.tags and page.handlers == []
    data = next(text for kind, text in page.scripts if kind == "application/json")
    assert json.loads(data)["warnings"] == [f"3 rows are longer than 2048 tokens {HOSTILE}"]
    assert "{{ 7*7 }}" in html  # neither a template of ours


def test_bars_share_one_scale(done: RunFolder) -> None:
    estimate, measured = run_bars(view_run(done))
    assert measured.segments[-1].start + measured.segments[-1].width == pytest.approx(100, abs=0.01)
    assert estimate.total_bytes < measured.total_bytes
    assert [s.name for s in estimate.segments][:2] == ["weights", "master_weights"]
