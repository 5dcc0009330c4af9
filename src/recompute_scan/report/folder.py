"""What a run's folder holds once it is analysed: the result and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recompute_scan.files import write

if TYPE_CHECKING:
    from recompute_scan.result import Result


def write_report(folder: Path, result: Result) -> None:
    """Write the result and its page into the run's folder, over what an earlier one left."""
    from recompute_scan.report.html import render_html  # noqa: PLC0415 - after the run, not before
    from recompute_scan.result import to_json  # noqa: PLC0415

    write(folder / "result.json", to_json(result), force=True)
    write(folder / "report.html", render_html(result), force=True)
