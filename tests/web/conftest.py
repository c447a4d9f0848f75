"""The page over made runs, and a real headless Chromium to look at it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from made_runs import HOSTILE, fill
from served_page import Page

from shardwise.runs import create_run
from shardwise.web.library import Library


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs as training leaves them: done, interrupted, long, and one full of hostile text."""
    folder = tmp_path_factory.mktemp("web") / "runs"
    recipe = "model: tiny\ndata: rows.jsonl\nlora: {rank: %d}\n"
    fill(create_run(folder, "first", recipe % 8, {}))
    fill(create_run(folder, "second", recipe % 16, {}), steps=60, state="interrupted")
    fill(create_run(folder, "hostile", recipe % 8 + f"# {HOSTILE}\n", {"note": HOSTILE}), hostile=HOSTILE)
    return folder


@pytest.fixture(scope="session")
def site(made: Path) -> Iterator[Page]:
    page = Page(Library(made))
    yield page
    page.close()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's chromium through its own driver; skipped where they are not installed."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1200,1000"
    )
    for flag in flags.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    made.set_page_load_timeout(60)
    yield made
    made.quit()
