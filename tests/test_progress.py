"""The bar below what goes on: when it is drawn, how it goes away, and that it knows how far."""

import io
import sys
from pathlib import Path

import pytest

from recompute_scan.cli import output
from recompute_scan.progress import Pieces, how_far, reading, reporting
from recompute_scan.trace import load
from recompute_scan.trace.kineto.reader import Reader
from tests.record.test_terminal import shown

TRACE = Path(__file__).parents[1] / "traces" / "plain_once" / "trace-rank0.json.gz"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def begun(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> output.Bar:
    monkeypatch.setattr(output.Bar, "_keep_drawing", lambda _: None)  # drawn by hand here
    drawn = output.Bar(clock)
    drawn.begin()
    return drawn


def test_short_work_has_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = Clock()
    drawn = begun(clock, monkeypatch)
    clock.now += 1.9
    drawn.draw()
    assert terminal.getvalue() == ""


def test_long_work_has_one_that_grows_and_goes_away(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = Clock()
    drawn = begun(clock, monkeypatch)
    done = 0.25
    with reporting(lambda: done):
        for clock.now, done, cells in ((102.0, 0.25, 7), (110.0, 0.5, 15), (120.0, 1.0, 30)):
            drawn.draw()
            (line,) = shown(terminal.getvalue())
            assert line.count("█") == cells
            assert line.endswith(f"{done:.0%}, {clock.now - 100:.0f} s".replace("%", " %"))
            assert len(line) < 80
    drawn.draw()
    assert shown(terminal.getvalue()) == ["  20 s"]
    drawn.clear()
    drawn.draw()
    assert shown(terminal.getvalue()) == []


def test_a_next_line_and_a_result_take_the_place_of_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(output, "_BAR", begun(Clock(), monkeypatch))
    output.progress("reading one.json")
    monkeypatch.setattr(output, "_AFTER_S", 0.0)
    output._BAR.draw()
    assert len(shown(terminal.getvalue())) == 2
    output.progress("reading two.json")
    output.clear()
    assert shown(terminal.getvalue()) == [
        "recompute-scan: reading one.json",
        "recompute-scan: reading two.json",
    ]


def test_nothing_is_drawn_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(output, "_AFTER_S", 0.0)
    output.progress("reading")
    output._BAR.draw()
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
    clock = Clock()
    pieces = Pieces(4, clock)
    clock.now += 7
    assert pieces.share() == 0
    pieces.done()
    assert pieces.share() == pytest.approx(1 / 4)
    clock.now += 3.5
    assert pieces.share() == pytest.approx(1.5 / 4)
    clock.now += 100
    assert pieces.share() == pytest.approx(1.95 / 4)
    for _ in range(3):
        pieces.done()
    clock.now += 1000
    assert 4 / 5 <= pieces.share() < 1
