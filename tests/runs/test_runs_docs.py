"""docs/runs.md names every event and every field of one."""

import re
from pathlib import Path

from shardwise.runs import EVENTS, Event

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"


def test_docs_name_every_event_with_its_fields() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    for kind, record in EVENTS.items():
        told = set(re.findall(r"`(\w+)`", rows[kind]))
        assert told == set(record.model_fields) - set(Event.model_fields), kind
