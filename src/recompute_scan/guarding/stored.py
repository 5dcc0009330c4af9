"""What is usual, kept in a file from one run to the next."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from recompute_scan.errors import InputError
from recompute_scan.files import write_whole
from recompute_scan.guarding.changes import WatchedPart

FORMAT = "recompute-scan-guard/1"


class Stored(Struct, frozen=True):
    """What a guard has learned.

    Attributes:
        modules: Checkpoints of each module that is recomputed, by qualified name.
        format: ``recompute-scan-guard/1``.
        torch: Version that it was learned with.
        steps: Steps that the guard has seen, over all runs.
        trained: Modules that had gradients when the first steps were over.
    """

    modules: dict[str, tuple[WatchedPart, ...]]
    format: str = FORMAT
    torch: str = ""
    steps: int = 0
    trained: tuple[str, ...] = ()


def read_stored(path: Path) -> Stored:
    """What a file has.

    Raises:
        InputError: It cannot be read, or is no such file (``E351``).
    """
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=Stored)
    except OSError as error:
        raise InputError("E351", f"Cannot read {path}.", why=error.strerror) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_baseline(path, str(error)) from None
    if stored.format != FORMAT:
        raise _no_baseline(path, f"its format is {stored.format!r}, not {FORMAT!r}")
    return stored


def _no_baseline(path: Path, why: str) -> InputError:
    return InputError(
        "E351",
        f"{path} is no baseline of the guard.",
        why=why,
        hint="leave it out once; guard(baseline=…) writes it when the training ends",
    )


def write_stored(path: Path, stored: Stored) -> None:
    """Write it, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(stored)) + b"\n")
