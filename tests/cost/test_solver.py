"""The solver says nothing, and what others print while it is made comes through."""

from pathlib import Path

from tests.record.runs import run_plain

# As highspy 1.16 does it: by C's buffered stream, when the first solver is made.
BANNER = """\
import ctypes, os, sys, types
libc = ctypes.CDLL(None)
class Highs:
    def __init__(self):
        libc.printf(b"Running HiGHS 9.9.9 (git hash: 1): Copyright (c) 2099\\n")
        libc.printf(b"Includes third-party software components, see NOTICES\\n")
        os.write(1, b"of another thread\\n")
    silent = setOptionValue = lambda *_: None
sys.modules["highspy"] = types.SimpleNamespace(Highs=Highs)
"""
MAKE = """\
from recompute_scan.cost.arrangement import silent_solver
libc.printf(b"by C\\n")
print("by Python")
silent_solver(1.0)
print("behind")
"""


def test_the_banner_is_left_out_and_all_else_passes_in_order() -> None:
    done = run_plain(Path.cwd(), "-c", BANNER + MAKE, PYTHONUNBUFFERED="")
    assert done.stdout == "by Python\nby C\nof another thread\nbehind\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_standard_output_is_no_hindrance() -> None:
    close = "import os\nos.close(1)\n"
    make = "from recompute_scan.cost.arrangement import silent_solver\nsilent_solver(1.0)\n"
    assert run_plain(Path.cwd(), "-c", close + make).returncode == 0
