"""A real Chromium, and a page in it that records whatever a report should never do."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    sync_playwright,
)

from recompute_scan.report.render import render_html
from recompute_scan.result import Result
from tests.report.pages import page as page_of


@dataclass
class Watched:
    """A page with a record of its complaints: console lines, script errors, requests, dialogs."""

    page: Page
    address: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        foreign = [address for address in self.requests if address.split("#")[0] != self.address]
        return self.console + foreign + self.dialogs


Open = Callable[..., Watched]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.fail("No chromium: install Debian's package, or name one in $CHROMIUM.")
    with sync_playwright() as playwright:
        # The sandbox refuses to run as root, as containers do. The rest keeps Chromium from
        # asking its maker's hosts for anything.
        quiet = ("no-sandbox", "disable-quic", "disable-background-networking")
        found = playwright.chromium.launch(
            executable_path=path, args=[f"--{flag}" for flag in (*quiet, "disable-sync")]
        )
        yield found
        found.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of that name, or the report of a result; keywords go to ``new_context``."""
    contexts: list[BrowserContext] = []

    def open_page(shown: str | Result, **options: Any) -> Watched:
        path = tmp_path / f"report-{len(contexts)}.html"
        text = page_of(shown) if isinstance(shown, str) else render_html(shown)
        path.write_text(text, encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        watched = Watched(context.new_page(), path.as_uri())
        page = watched.page

        def note_request(request: Request) -> None:
            watched.requests.append(request.url)

        def note_error(error: Exception) -> None:
            watched.console.append(str(error))

        def note_line(line: ConsoleMessage) -> None:
            watched.console.append(f"{line.type}: {line.text}")

        def note_dialog(dialog: Dialog) -> None:
            watched.dialogs.append(dialog.message)
            dialog.dismiss()

        page.on("request", note_request)
        page.on("pageerror", note_error)
        page.on("console", note_line)
        page.on("dialog", note_dialog)
        page.goto(watched.address)
        return watched

    yield open_page
    for context in contexts:
        context.close()
