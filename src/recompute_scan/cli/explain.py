"""``recompute-scan explain``: what a finding means, or what a log or traceback shows."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import click

from recompute_scan.cli.output import debug_option
from recompute_scan.errors import InputError, UsageError

_CODE = re.compile(r"RS\d{3}", re.IGNORECASE)


@click.command(short_help="Say what a finding means, or what a traceback shows.")
@click.argument("what", required=False)
@debug_option
def explain(what: str | None, debug: bool) -> int:
    """Explain WHAT: the code of a finding (RS101), a log file, or - for text on standard input.

    In a log, of one process or of many, the exception that came first is looked for, its cause
    where it is a known one, and the fix. Logs of any size are read. Without WHAT all findings are
    listed.
    """
    if what is None:
        return _list_codes()
    if _CODE.fullmatch(what) and not Path(what).exists():
        return _explain_code(what)
    from recompute_scan.diagnose.classify import diagnose_log
    from recompute_scan.diagnose.logs import lines_of, read_log
    from recompute_scan.diagnose.outcome import finding_of
    from recompute_scan.report.finding_words import explanation

    if what == "-":
        log = read_log(lines_of(sys.stdin.buffer))
    else:
        try:
            with Path(what).open("rb") as file:
                log = read_log(lines_of(file))
        except FileNotFoundError:
            raise UsageError(
                "E213",
                f"There is neither a finding nor a file named {what}.",
                hint="give a code such as RS101, a log file, or - to paste a traceback",
            ) from None
        except OSError as error:
            raise InputError("E301", f"Cannot read {what}.", why=error.strerror) from None
    found = diagnose_log(log)
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    text = explanation(
        [finding_of(found.cause)] if found.cause else [],
        [finding_of(hint) for hint in found.hints],
        found.first.errors[-1].summary if found.first else None,
        color=color,
    )
    click.echo(text, nl=False, color=color)
    return 0


def _explain_code(code: str) -> int:
    from recompute_scan.pages import page

    text = page(code)
    if text is None:
        raise UsageError("E214", f"There is no finding {code.upper()}.", hint=_nearest(code))
    click.echo(text, nl=False)
    return 0


def _list_codes() -> int:
    from recompute_scan.pages import titles

    for code, name in titles().items():
        click.echo(f"{code}  {name}")
    return 0


def _nearest(code: str) -> str:
    """Codes that there are, those spelt alike first."""
    from recompute_scan.pages import titles

    near = difflib.get_close_matches(code.upper(), titles(), n=3, cutoff=0.6)
    like = f"{', '.join(near)} are spelt alike; " if near else ""
    return f"{like}without an argument recompute-scan explain lists all"
