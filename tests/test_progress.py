"""The bar below what goes on: when it is drawn, how it goes away, and that it knows how far."""

import io
import sys
import time
from pathlib import Path

import pytest

from recompute_scan.cli import output
from recompute_scan.progress import Pieces, how_far, reading, reporting
from recompute_scan.trace import load
from recompute_scan.trace.kineto.reader import Reader
from tests.record.test_terminal import Terminal, shown

TRACE = Path(__file__).parents[1] / "traces" / "plain_once" / "trace-rank0.json.gz"


def made(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    return terminal


def seen(terminal: Terminal, text: str) -> list[str]:
    """What the terminal shows once the text is there."""
    ends = time.monotonic() + 30
    while not any(text in line for line in shown(terminal.getvalue())):
        assert time.monotonic() < ends, shown(terminal.getvalue())
        time.sleep(0.02)
    return shown(terminal.getvalue())


def test_short_work_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made(monkeypatch)
    output.progress("reading one.json")
    output.clear()
    assert shown(terminal.getvalue()) == ["recompute-scan: reading one.json"]


def test_long_work_has_one_that_grows_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = made(monkeypatch)
    monkeypatch.setattr(output, "_AFTER_S", 0.0)
    done: float | None = None

    def share() -> float:
        if done is None:
            raise ValueError("not known yet")
        return done

    with reporting(share):
        output.progress("reading one.json")
        assert "left" not in seen(terminal, "0 s")[-1]
        for done in (0.25, 0.5, 1.0):
            line = seen(terminal, f"{done:.0%}")[-1]
            assert len(line) - len(line.lstrip("━")) == int(30 * done)
            assert line.endswith("left")
            assert len(line) < 80
        done = None
        time.sleep(1)  # several times as long as a bar stays as it is
        assert "left" not in shown(terminal.getvalue())[-1]
        output.progress("reading two.json")
        seen(terminal, "two.json")
        output.clear()
    assert "\x1b[?25" not in terminal.getvalue()  # a killed process would leave no cursor
    assert shown(terminal.getvalue()) == [
        "recompute-scan: reading one.json",
        "recompute-scan: reading two.json",
    ]


def test_nothing_is_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "_AFTER_S", 0.0)
    output.progress("reading")
    time.sleep(0.3)
    output.clear()
    assert stream.getvalue() == ""


def test_a_file_that_is_read_says_how_far(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(1000))
    assert how_far() is None
    with path.open("rb", buffering=0) as file, reading(file):
        assert how_far() == 0
        file.read(250)
        assert how_far() == 0.25
    with path.open("rb", buffering=0) as file, reading(file):
        file.close()
        assert how_far() is None
    assert how_far() is None


def test_reading_a_trace_says_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    original = Reader.read

    def watched(self: Reader) -> object:
        seen.append(how_far())
        result = original(self)
        seen.append(how_far())
        return result

    monkeypatch.setattr(Reader, "read", watched)
    load(TRACE)
    first, last = seen
    assert first is not None
    assert first < 1
    assert last == 1
    assert how_far() is None


def test_pieces_go_on_by_how_long_the_others_took() -> None:
    now = [100.0]
    pieces = Pieces(4, lambda: now[0])
    now[0] += 7
    assert pieces.share() == 0
    pieces.done()
    assert pieces.share() == pytest.approx(1 / 4)
    now[0] += 3.5
    assert pieces.share() == pytest.approx(1.5 / 4)
    now[0] += 100
    assert pieces.share() == pytest.approx(1.95 / 4)
    for _ in range(3):
        pieces.done()
    now[0] += 1000
    assert 4 / 5 <= pieces.share() < 1
