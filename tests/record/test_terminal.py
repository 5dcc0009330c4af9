"""What the recorder writes to the terminal, and what it keeps off it."""

from __future__ import annotations

import io
import os
import sys
import warnings

import pytest

from recompute_scan.record.progress import Progress
from recompute_scan.record.quiet import without_grad_warnings, without_kineto_noise


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_kinetos_own_lines_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with without_kineto_noise():
        os.write(2, b"USDT:2026-11-20 1:1 Handler.cpp:52] profiler_start\nuser: USDT: stays\n")
        os.write(2, b"no newline")
    os.write(2, b" after\n")
    assert capfd.readouterr().err == "user: USDT: stays\nno newline after\n"


def test_an_error_inside_still_shows_what_was_written(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), without_kineto_noise():
        os.write(2, b"said\n")
        raise ValueError("broken")
    assert capfd.readouterr().err == "said\n"


def test_one_warning_is_left_out_and_no_other_shown_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def warn() -> None:
        warnings.warn("the script's own", stacklevel=1)

    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.showwarning = lambda message, *_, **__: print(message)
        before = list(warnings.filters)
        warn()
        with without_grad_warnings():
            warnings.warn("The .grad attribute of a Tensor that is not a leaf", stacklevel=1)
            warn()
        warn()
        assert list(warnings.filters) == before
    assert capsys.readouterr().out == "the script's own\n"


def test_progress_replaces_its_line_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress()
    progress.show("profiling, step 10 of 10")
    progress.show("done")
    progress.clear()
    first, second, blank, end = terminal.getvalue().split("\r")[1:]
    assert first == "recompute-scan: profiling, step 10 of 10"
    assert second == "recompute-scan: done".ljust(len(first))
    assert (blank.strip(), end) == ("", "")


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    stream = io.StringIO() if wanted else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(wanted=wanted)
    progress.show("profiling")
    progress.clear()
    assert stream.getvalue() == ""
