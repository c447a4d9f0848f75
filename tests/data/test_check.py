"""`shardwise data check`: a report a person can act on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_toys import INPUTS, THINKING, chat, write_rows

from shardwise.cli.main import main


@pytest.fixture
def check(toy: Path, tmp_path: Path, capsys: Any) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        try:
            main(["data", "check", *args, "--model", str(toy), "--cache", str(tmp_path / "cache")])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_the_report_says_what_happened_to_every_row(check: Any) -> None:
    code, out, _ = check(str(INPUTS / "roles_odd.jsonl"))
    text = " ".join(out.split())
    assert code == 0
    assert "8 read = 2 to train on + 0 held out + 6 refused + 0 dropped" in text
    for part in (
        "message 2: two user turns in a row",
        "message 2: the answer is null",
        "「hello<|im_end|>」",
    ):
        assert part in text
    assert "You are a helpful toy" in text and "Tokens per row" in text


def test_json_is_for_programs(check: Any) -> None:
    code, out, err = check(str(INPUTS / "roles_odd.jsonl"), "--json", "--rows", "1", "--no-packing")
    tree = json.loads(out)
    assert code == 0 and err == ""
    assert tree["report"]["rows_refused"] == 6 and tree["packing"]["sequences"] == 2
    assert ["hello<|im_end|>", True] in tree["samples"][-1]["parts"] or tree["samples"][0]["line"] == 5


def test_html_stands_alone_and_escapes_rows(check: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "x.jsonl", [chat("<script>alert(1)</script>", "a")])
    code, _, err = check(str(rows), "--html", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert code == 0 and "wrote" in err
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    assert "<mark>a&lt;|im_end|&gt;</mark>" in page and "http" not in page.replace("http-equiv", "")


def test_a_stream_is_looked_at_by_its_first_rows(check: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "x.jsonl", [chat(f"q{i}", "a") for i in range(300)] + [{"messages": []}])
    code, out, _ = check(str(rows), "--streaming")
    text = " ".join(out.split())
    assert code == 0 and "256 read = 256 to train on" in text
    assert "read during the run and never kept" in text
    assert not (tmp_path / "cache" / "data").exists()


def test_answers_without_a_label_are_counted(check: Any, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "x.jsonl", [chat("q", "one", "r", "two", "s", "three"), chat("q", "a")])
    (tmp_path / "t.jinja").write_text(THINKING)
    code, out, _ = check(str(rows), "--chat-template", str(tmp_path / "t.jinja"))
    text = " ".join(out.split())
    assert code == 0 and "2 of 4 carry a label; the template writes the other 2 differently" in text
    assert "carry a label; the template" not in check(str(rows))[1]


def test_preference_pairs_are_shown(check: Any, tmp_path: Path) -> None:
    code, out, _ = check(str(INPUTS / "dpo_multi_turn.jsonl"))
    assert code == 0 and "assistant: GOOD" in out and "assistant: BAD" in out
    code, out, _ = check(str(INPUTS / "dpo_multi_turn.jsonl"), "--html", str(tmp_path / "pairs.html"))
    assert code == 0 and out == "" and "assistant: GOOD" in (tmp_path / "pairs.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([str(INPUTS / "bad_line3.jsonl")], "bad_line3.jsonl, line 3, column 33"),
        ([str(INPUTS / "empty.jsonl")], "has no rows"),
        (["nowhere.jsonl"], "does not exist"),
        ([str(INPUTS / "one_row.jsonl"), "--format", "poem"], "format"),
        ([str(INPUTS / "one_row.jsonl"), "--validation", "5"], "there are 1 rows"),
        ([str(INPUTS / "multi_turn_4.jsonl"), "--chat-template", "none"], "chatml, gemma, llama3"),
    ],
)
def test_misuse_is_three_lines_and_exit_2(check: Any, args: list[str], said: str) -> None:
    code, out, err = check(*args)
    assert code == 2 and said in err and "Traceback" not in err and out == ""
    assert err.startswith("error: ") and " hint: " in err


def test_naming_the_room_costs_nothing_heavy() -> None:
    code = (
        "import sys, shardwise.data, shardwise.cli.data;"
        "print([m for m in ('torch', 'numpy', 'transformers', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
