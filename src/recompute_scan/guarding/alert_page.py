"""What the guard has told so far as a page, which trackers keep beside its alerts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from recompute_scan.guarding.changes import Change
from recompute_scan.report.escape import sentence, visible

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;"
    "color-scheme:light dark}table{border-collapse:collapse;width:100%}"
    "th,td{border-bottom:1px solid #8886;padding:.4rem .6rem;text-align:left;vertical-align:top}"
)
_COLUMNS = ("Since step", "Kind", "Where", "Recomputes per forward", "Step time", "Memory", "What")


def alert_page(changes: Sequence[Change]) -> bytes:
    """One row for each change, the latest first, as HTML in UTF-8 that needs no other file."""
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(one)) + "</tr>\n"
        for one in reversed(changes)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<title>Recomputes have changed</title>"
        f"<style>{_STYLE}</style><h1>Recomputes have changed</h1>"
        "<p>Told by the guard of recompute-scan while the training went on.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></html>\n"
    ).encode("utf-8", "replace")


def _cells(change: Change) -> tuple[str, ...]:
    where = [escape(visible(one)) for one in (*change.modules, *change.sites)]
    return (
        str(change.step),
        change.kind,
        "<br>".join(where),
        f"{change.after}, {change.before} before",
        _times(change.slower),
        _times(change.memory),
        escape(sentence(change.text, 1000)),
    )


def _times(ratio: float | None) -> str:
    return "not known" if ratio is None else f"{ratio:.2f} times"
