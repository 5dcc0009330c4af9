"""What the recorder writes to the terminal, and what it keeps off it."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import warnings

import pyte
import pytest

from recompute_scan.record import profiler
from recompute_scan.record.profiler import Progress, without_grad_warnings, without_kineto_noise
from recompute_scan.record.steps import Plan
from recompute_scan.terminal import fresh_line


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


def test_each_phase_is_said_once_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    terminal.write("loss 0.5")  # what the script left unfinished stays
    progress = Progress()
    for text in ("timing 2 steps", "timing 2 steps", "profiling 1 step"):
        progress.show(text)
    assert shown(terminal.getvalue()) == [
        "loss 0.5",
        "recompute-scan: timing 2 steps",
        "recompute-scan: profiling 1 step",
    ]


def test_a_long_phase_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = Progress()
    progress.show("timing 3 steps", 2)
    plan = Plan(warmup=1, timing=3, steps=2)
    progress.remind(*plan.at(2, 8.0))
    monkeypatch.setattr(profiler, "_REMIND_S", 0.0)
    progress.remind(*plan.at(3, 8.0))
    assert shown(terminal.getvalue()) == [
        "recompute-scan: timing 3 steps",
        f"recompute-scan: step 3 of {plan.wanted}: timing 3 steps; about 40 s left",
    ]


def test_nothing_is_written_to_what_the_script_put_in_its_place(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(logs=True)
    monkeypatch.setattr(sys, "stderr", object())  # it has no isatty either
    progress.show("timing 2 steps", step=1)
    assert capfd.readouterr().err.endswith("step 1: timing 2 steps\n")
    before, other = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(other, 2)
    try:
        progress._stream = said = io.StringIO()  # of a file that is gone
        progress.show("profiling 1 step", step=3)
    finally:
        os.dup2(before, 2)
    assert not said.getvalue()


@pytest.mark.parametrize("before", [0, 1, 40, 79, 80, 81])
def test_a_fresh_line_on_a_real_terminal(before: int) -> None:
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(end, "w") as terminal:
        terminal.write("x" * before + fresh_line(terminal) + "here\n")
    lines = shown(os.read(main, 1000).decode().replace("\r\n", "\n"))
    os.close(main)
    text = "x" * before
    assert lines == [*(text[at : at + 80] for at in range(0, before, 80)), "here"]


def shown(text: str) -> list[str]:
    """What a terminal of 80 columns shows, without blank lines."""
    screen = pyte.Screen(80, 100)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(text)
    return [line for line in (each.rstrip() for each in screen.display) if line]


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    stream = io.StringIO() if wanted else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(wanted=wanted)
    progress.show("profiling")
    assert stream.getvalue() == ""


_FREES = """
import tempfile, warnings
from pathlib import Path
import torch
from recompute_scan.record.profiler import ProfilerWindow, without_own_warnings

warnings.simplefilter("error")
old = [torch.randn(100) for _ in range(20)]
with without_own_warnings():
    window = ProfilerWindow(lead=0, steps=1, device="cuda", stacks=True)
    window.start()
old.clear()
x = torch.randn(10)
with without_own_warnings():
    window.step()
window.export(Path(tempfile.mkdtemp()) / "stacks.json.gz")
"""


def test_nothing_is_said_of_tensors_from_before_that_are_freed_while_memory_is_recorded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREES], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
