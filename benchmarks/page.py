"""How heavy the report is and how soon its verdict is painted, in a real Chromium.

Every page is opened from a file in a context of its own, without script and with it. The time is
that of the first contentful paint after the navigation began (Paint Timing); the browser has been
started before. It needs what `make browser` installs. The status is 1 where a page misses a target.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from playwright.sync_api import sync_playwright
from tests.report.pages import page, ranks

from benchmarks._frame import Table, benchmark
from benchmarks._machine import machine
from recompute_scan.report.render import render_html

_PAINT = "performance.getEntriesByType('paint').find(e => e.name.startsWith('first-c'))?.startTime"
_VERDICT = "document.querySelector('#verdict-title').getBoundingClientRect().bottom"
_PARTS = "document.querySelectorAll('*').length"
_DRAWN = "document.querySelectorAll('svg rect').length"


@dataclass(frozen=True)
class Subject:
    """A page, and what it may weigh and take (MB, s); ``None`` where no target was set."""

    name: str
    text: str
    most_mb: float | None = None
    most_s: float | None = None


def subjects() -> tuple[Subject, ...]:
    """The demo's page, and those of large jobs."""
    return (
        Subject("the demo: 4 layers doubled", page("doubled"), 2.5, 0.2),
        Subject("512 ranks", render_html(ranks(512)), 8.0),
        Subject("512 ranks, 200 layers, 100 steps", page("large"), 8.0),
    )


def measure(browser: Any, address: str, runs: int, *, script: bool) -> list[float]:
    """Seconds from the start of the navigation to the first contentful paint, run by run."""
    found = []
    for _ in range(runs):
        context = browser.new_context(java_script_enabled=script)
        opened = context.new_page()
        opened.goto(address)
        assert opened.evaluate(_VERDICT) < opened.viewport_size["height"]
        while (painted := opened.evaluate(_PAINT)) is None:
            opened.wait_for_timeout(50)
        found.append(painted / 1000)
        context.close()
    return found


@benchmark
@click.option("--runs", default=15)
def main(runs: int) -> int:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise click.UsageError("No chromium: install Debian's package, or name one in $CHROMIUM.")
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(f"{machine('playwright')}, Chromium {browser.version}; medians of {runs} runs\n")
        columns = {"page": "<", "MB": ">.2f", "elements": ">,", "drawn": ">,"}
        painted = {"first paint, s: no script": ">", "with script": ">.3f"}
        table = Table({**columns, **painted}, markdown=True)
        for subject in subjects():
            path = Path(folder, "report.html")
            path.write_text(subject.text, encoding="utf-8")
            size = path.stat().st_size / 1e6
            plain, full = (
                measure(browser, path.as_uri(), runs, script=script) for script in (False, True)
            )
            opened = browser.new_page()
            opened.goto(path.as_uri())
            parts = (opened.evaluate(_PARTS), opened.evaluate(_DRAWN))
            opened.close()
            shown = f"{median(plain):.3f} ({min(plain):.3f} to {max(plain):.3f})"
            table.row(subject.name, size, *parts, shown, median(full))
            if subject.most_mb is not None and size > subject.most_mb:
                missed.append(f"{subject.name}: at most {subject.most_mb} MB")
            if subject.most_s is not None and median(plain) > subject.most_s:
                missed.append(f"{subject.name}: at most {subject.most_s} s")
        browser.close()
    print("".join(f"\nmissed: {one}" for one in missed))
    return int(bool(missed))
