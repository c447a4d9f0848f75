"""The Data page: the check of the command line, only for files it may read."""

import json
import re
from pathlib import Path
from urllib.parse import urlencode

from served_page import Page
from test_runs_pages import get

from shardwise.runs import create_run
from shardwise.web.library import Library


def test_report_rows_and_trained_tokens_of_a_file(tmp_path: Path, tiny_model: Path, chat_file: Path) -> None:
    site = Page(Library(tmp_path, (str(chat_file),), (str(tiny_model),)))
    try:
        query = urlencode({"file": str(chat_file), "model": str(tiny_model)})
        told = json.loads(get(site, f"/data.json?{query}")[1])
        assert told["report"]["rows_read"] == 24
        text = get(site, f"/data?{query}")[1].decode()
        marked = re.findall(r"<mark>(.*?)</mark>", text, re.DOTALL)
        assert len(marked) == len(told["samples"]) > 0
        assert "Tokens per row" in text and "&lt;|im_start|&gt;user" in text
        assert "<|im_start|>" not in text
    finally:
        site.close()


def test_only_named_files_and_files_of_runs_are_read(
    tmp_path: Path, tiny_model: Path, chat_file: Path
) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"text": "SECRET"}\n')
    create_run(tmp_path / "runs", "one", f"model: {tiny_model}\ndata: {chat_file}\n", {})
    site = Page(Library(tmp_path / "runs"))
    try:
        assert json.loads(get(site, "/data.json")[1]) == {
            "files": [str(chat_file)],
            "models": [str(tiny_model)],
        }
        for file in (str(secret), "/etc/passwd", "../secret.jsonl"):
            status, text = get(site, f"/data.json?{urlencode({'file': file, 'model': str(tiny_model)})}")
            assert status == 404 and b"SECRET" not in text
            text = get(site, f"/data?{urlencode({'file': file})}")[1]
            assert b"SECRET" not in text and b"root:" not in text
        status, text = get(site, f"/data.json?{urlencode({'file': str(chat_file), 'model': '/etc'})}")
        assert status == 404 and "may read" in json.loads(text)["error"]
    finally:
        site.close()
