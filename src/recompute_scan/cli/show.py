"""``report``, ``compare``, ``explain``, ``doctor`` and ``completion``: commands that only print."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal

import click

from recompute_scan.cli.output import (
    clear,
    debug_option,
    file_option,
    files,
    force_option,
    format_option,
    newest,
    open_option,
    progress,
    say,
    show_page,
    verbose_option,
)
from recompute_scan.errors import InputError, UsageError
from recompute_scan.files import opened, read, refuse_existing, write
from recompute_scan.terminal import colored, inert, width


@click.command(short_help="Make the HTML report again from a result.")
@click.argument("result", callback=newest, shell_complete=files)
@file_option("--html", help_text="Where to write it.  [default: report.html next to the result]")
@force_option
@open_option
@debug_option
def report(result: str, html: Path | None, force: bool, open_page: bool) -> int:
    """Make the HTML report again from RESULT: a run's folder, or the JSON that `analyze` wrote."""
    from recompute_scan.report.render import render_html
    from recompute_scan.result import from_json

    source = Path(result)
    source = source / "result.json" if source.is_dir() else source
    text = read(source, held=True)
    target = html or source.with_name("report.html")
    # The page next to a result is ours to make again.
    known = source.parent if source.name == "result.json" else source
    page = render_html(from_json(text), folder=str(known))
    write(target, page, force=force or html is None)
    say(f"{inert(str(target))}\n")
    if open_page:
        show_page(target)
    return 0


@click.command(short_help="Set two runs side by side.")
@click.argument("before", callback=newest, shell_complete=files)
@click.argument("after", callback=newest, shell_complete=files)
@file_option("--html", help_text="Write a page.")
@format_option("text", "json")
@force_option
@verbose_option
@debug_option
def compare(
    before: str,
    after: str,
    html: Path | None,
    style: Literal["text", "json"],
    force: bool,
    verbose: bool,
) -> int:
    """Say what differs between BEFORE and AFTER: counts, step time, findings, checkpoints.

    Each is a folder that `run` wrote, a trace or a folder of traces, or a result.json.
    """
    from recompute_scan.analysis.pipeline import result_at
    from recompute_scan.result import compare

    if html is not None:
        refuse_existing(html, force=force)
    results = [result_at(address, progress) for address in (before, after)]
    clear()
    comparison = compare.compare(results[0], results[1], (before, after))
    if html is not None:
        from recompute_scan.report.compared import render_comparison_html

        write(html, render_comparison_html(comparison), force=force)
    if style == "json":
        text = compare.to_json(comparison)
    else:
        from recompute_scan.report import compared

        in_full, in_short = compared.render_comparison_text, compared.render_comparison_answer
        text = (in_full if verbose else in_short)(comparison)
    say(text, style)
    return 0


_CODE = re.compile(r"(RS|E)\d{3}", re.IGNORECASE)


@click.command(short_help="Explain a finding, a message or a traceback.")
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
        verbose=verbose,
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


_COLORS = {"ok": "green", "missing": None, "problem": "red"}
_WIDTH = 80


@click.command(short_help="List what is installed, and what it allows.")
@debug_option
def doctor() -> int:
    """Look at what is installed: torch and its GPUs, launchers, the optional packages.

    A line that begins with `missing` names something that only some uses need.
    """
    import textwrap

    from recompute_scan.installation import heading, look
    from recompute_scan.report.templating import visible

    lines = look()
    say(f"{heading()}\n\n")
    color = colored(sys.stdout)
    wide = max(len(line.purpose) for line in lines)
    for line in lines:
        state = f"{line.state:<9}"
        if color:
            state = click.style(state, fg=_COLORS[line.state], bold=line.state != "missing")
        margin = 9 + wide + 2
        said = textwrap.wrap(visible(line.found, 400), _WIDTH - margin, break_on_hyphens=False)
        first, *more = said or [""]
        say(f"{state}{line.purpose:<{wide}}  {first}\n", codes=color)
        for each in more:
            say(f"{' ' * margin}{each}\n")
    return 0


@click.command(short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script by which SHELL completes commands, options and files.

    \b
    bash:  recompute-scan completion bash >> ~/.bashrc
    zsh:   recompute-scan completion zsh >> ~/.zshrc
    fish:  recompute-scan completion fish > ~/.config/fish/completions/recompute-scan.fish
    """  # noqa: D301 - \\b is the character by which click keeps lines as they are
    from click.shell_completion import ShellComplete, get_completion_class

    from recompute_scan.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(cli, {}, "recompute-scan", "_RECOMPUTE_SCAN_COMPLETE")
    say(ShellComplete.source(made) + "\n")  # bash's own would start bash to ask for its version
    return 0
