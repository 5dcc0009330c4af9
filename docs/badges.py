"""The README's badges as SVG, of what is measured or declared in this repository.

Python and torch are the oldest and the newest in the table of ``docs/accuracy.md`` whose rows an
environment of each version gave; licence and typing are what ``pyproject.toml`` declares. Files of
our own, since a badge that is fetched tells its server who reads the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# One row of the table: torch, transformers, Python.
_ROW = re.compile(r"^\| (\d+\.\d+)\.\d+ \| [\d.]+ \| (\d+\.\d+)\.\d+ \|", re.MULTILINE)
_LICENSE = re.compile(r'^license = "(.+)"$', re.MULTILINE)
# DejaVu Sans at 11 px is 6.6 px wide on average, and wider in no word here.
_PER_CHARACTER = 6.8
_MARGIN = 8
_HEIGHT = 20
_LEFT, _RIGHT, _TEXT = "#454b57", "#0b57b7", "#ffffff"


def badges() -> dict[str, str]:
    """Each badge's SVG by its name below ``docs``."""
    tested = (ROOT / "benchmarks" / "results" / "correctness.md").read_text(encoding="utf-8")
    torch, python = zip(*_ROW.findall(tested), strict=True)
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (license_,) = _LICENSE.findall(declared)
    said = {
        "python": ("Python", _span(python)),
        "torch": ("torch", _span(torch)),
        "license": ("license", license_),
        "types": ("types", "strict" if "strict = true" in declared else "none"),
    }
    return {f"img/badge-{name}.svg": _svg(*words) for name, words in said.items()}


def _span(versions: Iterable[str]) -> str:
    """The oldest and the newest."""
    ordered = sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    return f"{ordered[0]} to {ordered[-1]}"


def _svg(name: str, value: str) -> str:
    widths = [round(len(word) * _PER_CHARACTER) + 2 * _MARGIN for word in (name, value)]
    return "".join(_drawn(name, value, *widths))


def _drawn(name: str, value: str, left: int, right: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" '
        f'role="img" aria-label="{name}: {value}">\n<title>{name}: {value}</title>\n'
    )
    for x, width, color, word in ((0, left, _LEFT, name), (left, right, _RIGHT, value)):
        yield f'<rect x="{x}" width="{width}" height="{_HEIGHT}" fill="{color}"/>\n'
        yield (
            f'<text x="{x + width / 2}" y="14" text-anchor="middle" fill="{_TEXT}" '
            f'font-family="DejaVu Sans,Verdana,sans-serif" font-size="11">{word}</text>\n'
        )
    yield "</svg>\n"
