"""A page of the documentation (a finding's, or a part of one) as a terminal shows it.

Only what these pages use of Markdown: headings, paragraphs, lists, tables, fences, bold, code and
links. A link keeps its address where it leads somewhere, and relative ones lead to the project's.
"""

from __future__ import annotations

import re

from recompute_scan.report.blocks import Page

_HOME = "https://github.com/recompute-scan/recompute-scan/blob/main/docs/"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]{1,400})\)")
_BARE = re.compile(r"<(https://[^<>\s]+)>")
_MARKS = re.compile(r"\*\*|(?<!`)`(?!`)|(?<!\w)\*(?=\w)|(?<=[\w.])\*(?!\w)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
# How a page came to be is of no use to whom a run has failed.
_GENERATED = re.compile(r"(?<!\s)\s*Generated: `[^`]*`\.?")


def sheet(markdown: str, page: Page, *, folder: str = "") -> str:
    """The text, ending in a line end.

    Args:
        markdown: A page of ours.
        page: An empty page of the terminal; it gives the width and the colour.
        folder: Where below ``docs`` the page is, with a slash at its end; relative links are from
            there.
    """
    for block in _blocks(_GENERATED.sub("", markdown)):
        page.written.append("")
        _write(block, page, folder)
    return "\n".join(page.written).strip("\n") + "\n"


def _blocks(markdown: str) -> list[list[str]]:
    """Lines that belong together: a heading, a fence, a paragraph, an item, a row."""
    blocks: list[list[str]] = [[]]
    fenced = False
    for line in markdown.splitlines():
        fence = line.startswith("```")
        alone = not fenced and (line.startswith("#") or (fence and blocks[-1]))
        if (not line.strip() and not fenced) or alone:
            blocks.append([])
        if line.strip() or fenced:
            blocks[-1].append(line)
        if fence:
            fenced = not fenced
        if not fenced and (fence or line.startswith("#")):
            blocks.append([])
    return [block for block in blocks if block]


def _write(block: list[str], page: Page, folder: str) -> None:
    first = block[0]
    if first.startswith("```"):
        for line in block[1:-1]:
            page.verbatim(line, "    ", dim=True)
    elif first.startswith("#"):
        page.prose(_plain(first.lstrip("# "), folder), "", bold=True)
    elif first.startswith("|"):
        for row in block:
            if not re.fullmatch(r"[|\s:-]+", row):
                cells = [_plain(cell.strip(), folder) for cell in row.strip("|").split(" | ")]
                between = ": " if len(cells) == 2 else "  "
                text = between.join(cell.strip() for cell in cells).replace("?: ", "? ")
                page.prose(text, "      ", "  ")
    else:
        for part in _parts(block):
            item = _ITEM.match(part)
            text = _plain(part, folder)
            page.prose(text, "    " if item else "", "  " if item else "")


def _parts(block: list[str]) -> list[str]:
    """A paragraph as one, a list item by item."""
    parts: list[str] = []
    for line in block:
        if not parts or _ITEM.match(line):
            parts.append(line)
        else:
            parts[-1] += f" {line.strip()}"
    return parts


def _plain(text: str, folder: str) -> str:
    return _MARKS.sub("", _BARE.sub(r"\1", _LINK.sub(lambda link: _link(link, folder), text)))


def _link(link: re.Match[str], folder: str) -> str:
    text, target = link[1], link[2]
    if target.startswith("#"):
        return text
    if re.fullmatch(r"RS\d{3}\.md", target) and text.startswith(target[:5]):
        return text  # `explain` has it too
    if not target.startswith("https://"):
        path = f"{folder}{target}"
        while re.search(r"(?<![^/])[^/]+/\.\./", path):
            path = re.sub(r"(?<![^/])[^/]+/\.\./", "", path, count=1)
        target = f"{_HOME}{path}" if not path.startswith("../") else f"{_HOME[:-5]}{path[3:]}"
    return f"{text} ({target})"
