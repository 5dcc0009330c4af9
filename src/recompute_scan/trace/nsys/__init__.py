"""Reader of Nsight Systems' SQLite export.

Which files are its own is told here, without loading what reads them, which takes 6 ms.
"""

from __future__ import annotations

from pathlib import Path

from recompute_scan.errors import InputError

# Nsight Systems' own files, which only its own programs read.
REPORT_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")
_MAGIC = b"SQLite format 3\0"


def is_sqlite(head: bytes) -> bool:
    """Whether a file that begins with these bytes (16 or more of them) is an SQLite database."""
    return head.startswith(_MAGIC)


def refuse_report(path: Path) -> InputError:
    """``E323``: Nsight Systems' own report, with the command that makes it readable."""
    return InputError(
        "E323",
        f"{path} is an Nsight Systems report, which only nsys itself can read.",
        hint=f"nsys export --type sqlite {path.name}, then give the .sqlite file",
    )
