"""The tuned numbers of the analysis."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("recompute", "cost", "analysis")
# Bounds on work and on what is shown, units, formulas' own numbers: not tuned.
NOT_TUNED = re.compile(
    r"NS_PER_MS|_MOST|_MOST_.*|MOST_.*|_LOOKED_AT|_HEAD|CHUNK|_PIECE|_LONGEST.*|_SHOWN.*|_SCALE"
    r"|_JOINED|_FINISHED|_DEEPEST|_TIMEOUT.*|.*_TIMEOUT_S|.*_BYTES|_MEDIAN_95|_DEVIATION|_MISSING"
    r"|LATEST_US|EARLIEST_US|NO_.*|UNKNOWN|.*_BIT|_LOW_\d\d|_TIME_LIMIT_S|_DENSE"
    # Records looked at, minus infinity, ties of a solver, points of a drawn curve.
    r"|_RECORDS|_LEVELS|_NEVER|_PREFERENCE|_CURVE_POINTS"
    # Choices by number.
    r"|KEEP|RECOMPUTE|SELECTIVE|OFFLOAD|PART"
    # A file that is not read, what decides on speed alone, a shell's status.
    r"|_LARGEST|_HEAD_LINES|_BYTES_A_WORKER|_INFLATES|_FEW_FRAMES|INTERRUPTED"
)


def numbers() -> Iterator[tuple[str, str, Any]]:
    """Module, name and value of every number at the top of a module of the analysis."""
    for room in ROOMS:
        for path in sorted((ROOT / "src" / "recompute_scan" / room).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
            loaded = importlib.import_module(module)
            for line in path.read_text(encoding="utf-8").splitlines():
                found = re.match(r"(_?[A-Z][A-Z_0-9]*)(?:, _?[A-Z_0-9]+)* = (?=[-0-9.]+)", line)
                for name in re.findall(r"_?[A-Z][A-Z_0-9]*", found[0]) if found else ():
                    value = vars(loaded).get(name)
                    tuned = isinstance(value, (int, float)) and not isinstance(value, bool)
                    if tuned and value and not NOT_TUNED.fullmatch(name):
                        yield module, name, value
