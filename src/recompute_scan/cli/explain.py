"""`explain`: what a finding or an error means.

``recompute-scan explain``: what a finding means, or what a log or traceback shows.

A page of the documentation (a finding's, or a part of one) as a terminal shows it.

Only what these pages use of Markdown: headings, paragraphs, lists, tables, fences, bold, code and
links. A link keeps its address where it leads somewhere, and relative ones lead to the project's.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from recompute_scan.cli.output import debug_option, say
from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import opened
from recompute_scan.report.blocks import Page
from recompute_scan.terminal import colored, width

_CODE = re.compile(r"(RS|E)\d{3}", re.IGNORECASE)


@click.command(short_help="Say what a finding means, or what a traceback shows.")
@click.argument("what", required=False)
@debug_option
def explain(what: str | None, debug: bool) -> int:
    """Explain WHAT: a code (of a finding: RS101, of a message: E202), a log file, or - for text
    on standard input.

    In a log, of one process or of many, the exception that came first is looked for, its cause
    where it is a known one, and the fix. Logs of any size are read. Without WHAT all codes are
    listed.
    """
    if what is None:
        return _list_codes()
    if _CODE.fullmatch(what) and not Path(what).exists():
        return _explain_code(what)
    from recompute_scan.diagnose.outcome import diagnose_log, finding_of, lines_of, read_log
    from recompute_scan.report.finding_words import explanation

    if what == "-":
        log = read_log(lines_of(sys.stdin.buffer))
    else:
        try:
            with opened(Path(what), held=True) as file:
                log = read_log(lines_of(file))
        except FileNotFoundError:
            raise UsageError(
                "E213",
                f"There is neither a finding nor a file named {what}.",
                hint="give a code such as RS101, a log file, or - to paste a traceback",
            ) from None
        except OSError as error:
            raise InputError("E301", f"Cannot read {what}.", why=error.strerror) from None
    if not log.read:
        raise UsageError(
            "E238",
            f"There is nothing to read in {'standard input' if what == '-' else what}.",
            why="it is empty",
            hint="give the log of a run, or paste a traceback behind recompute-scan explain -",
        )
    found = diagnose_log(log)
    color = colored(sys.stdout)
    text = explanation(
        [finding_of(found.cause)] if found.cause else [],
        [finding_of(hint) for hint in found.hints],
        found.first.errors[-1].summary if found.first else None,
        color=color,
        width=width(sys.stdout),
    )
    say(text, codes=color)
    return 0


def _explain_code(code: str) -> int:
    from recompute_scan.pages import message, page
    from recompute_scan.report.blocks import Page

    finding = code.upper().startswith("RS")
    text = page(code) if finding else message(code)
    if text is None:
        kind = "finding" if finding else "message"
        raise UsageError("E214", f"There is no {kind} {code.upper()}.", hint=_nearest(code))
    color = colored(sys.stdout)
    shown = sheet(text, Page(color, width(sys.stdout)), folder="findings/" if finding else "")
    say(shown, codes=color)
    return 0


def _list_codes() -> int:
    from recompute_scan.pages import messages, titles
    from recompute_scan.report.blocks import wrap

    for code, name in titles().items():
        say(f"{code}  {name}\n")
    say("\n".join(wrap(", ".join(messages()), " " * 10, "Messages: ")) + "\n")
    return 0


def _nearest(code: str) -> str:
    """Codes that there are, those spelt alike first."""
    from recompute_scan.pages import messages, titles

    known = [*titles()] if code.upper().startswith("RS") else [*messages()]
    import difflib

    near = difflib.get_close_matches(code.upper(), known, n=3, cutoff=0.6)
    like = f"{', '.join(near)} are spelt alike; " if near else ""
    return f"{like}without an argument recompute-scan explain lists all"


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
                page.prose("  ".join(cell.strip() for cell in cells), "      ", "  ")
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
