"""``recompute-scan explain``: what a finding means, or what a log or traceback shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from recompute_scan.cli.output import debug_option, files, say, verbose_option
from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import opened
from recompute_scan.terminal import colored, width

_CODE = re.compile(r"(RS|E)\d{3}", re.IGNORECASE)


@click.command(short_help="Say what a finding means, or what a traceback shows.")
@click.argument("what", required=False, shell_complete=files)
@verbose_option
@debug_option
def explain(what: str | None, verbose: bool) -> int:
    """Explain WHAT: a code (of a finding: RS101, of a message: E202), a log file, or - for text
    on standard input.

    In a log, of one process or of many, the exception that came first is looked for, its cause
    where it is a known one, and the fix. Logs of any size are read. Without WHAT all codes are
    listed.
    """
    if what is None:
        return _list_codes()
    if _CODE.fullmatch(what) and not Path(what).exists():
        return _explain_code(what, verbose=verbose)
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


def _explain_code(code: str, *, verbose: bool) -> int:
    from recompute_scan.pages import message, page
    from recompute_scan.report.blocks import Page
    from recompute_scan.report.finding_words import sheet, sheet_in_short

    finding = code.upper().startswith("RS")
    text = page(code) if finding else message(code)
    if text is None:
        kind = "finding" if finding else "message"
        raise UsageError("E214", f"There is no {kind} {code.upper()}.", hint=_nearest(code))
    color = colored(sys.stdout)
    page_of, folder = Page(color, width(sys.stdout)), "findings/" if finding else ""
    show = sheet if verbose or not finding else sheet_in_short
    say(show(text, page_of, folder=folder), codes=color)
    if show is sheet_in_short:
        say(f"\n  more    recompute-scan explain -v {code.upper()}\n")
    return 0


def _list_codes() -> int:
    from recompute_scan.pages import messages, titles
    from recompute_scan.report.blocks import wrap

    for code, name in titles().items():
        say(f"{code}  {name}\n")
    say("\n".join(wrap(", ".join(messages()), " " * 10, "Messages: ")) + "\n")
    return 0


def _nearest(code: str) -> str:
    """Codes that may be meant, and how to see all."""
    from recompute_scan.pages import messages, titles

    known = [*titles()] if code.upper().startswith("RS") else [*messages()]
    import difflib

    near = [one for one in known if one.startswith(code.upper()[:-1])]
    near = near or difflib.get_close_matches(code.upper(), known, cutoff=0.75)
    like = f"did you mean {' or '.join(near[:3])}? " if near else ""
    return f"{like}without an argument recompute-scan explain lists all"
