"""``report``, ``compare``, ``explain``, ``doctor`` and ``completion``: commands that only print."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from recompute_scan.cli.options import Grouped
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
from recompute_scan.errors import InputError, UsageError, how_to_add, meant
from recompute_scan.files import content, opened, read, refuse_existing, write
from recompute_scan.terminal import colored, inert, width


@click.command(cls=Grouped, short_help="Make the HTML report again from a result.")
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


@click.command(cls=Grouped, short_help="Set two runs side by side.")
@click.argument("before", callback=newest, shell_complete=files)
@click.argument("after", callback=newest, shell_complete=files)
@file_option("--html", help_text="Write the comparison as a page.")
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

    refuse_existing(html, force=force)
    results = [result_at(address, progress) for address in (before, after)]
    clear()
    comparison = compare.compare(results[0], results[1], (before, after))
    if html is not None:
        from recompute_scan.report.render import render_comparison_html

        write(html, render_comparison_html(comparison), force=force)
    if style == "json":
        text = compare.to_json(comparison)
    else:
        from recompute_scan.report import render

        in_full, in_short = render.render_comparison_text, render.render_comparison_answer
        text = (in_full if verbose else in_short)(comparison)
    say(text, style)
    return 0


_CODE = re.compile(r"(RS|E)\d{3}", re.IGNORECASE)


@click.command(cls=Grouped, short_help="Explain a finding, a message or a traceback.")
@click.argument("what", required=False, shell_complete=files)
@verbose_option
@debug_option
def explain(what: str | None, verbose: bool) -> int:
    """Explain WHAT: a code (of a finding: RS101, of a message: E202), a log file, or - for text
    on standard input.

    In a log of one or many processes, it finds the first exception, its cause if that is known,
    and the fix. Logs of any size are read. Without WHAT all codes are listed.
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
    from recompute_scan.report.finding_words import in_short, sheet

    finding = code.upper().startswith("RS")
    text = page(code) if finding else messages().get(code.upper())
    if text is None:
        kind = "finding" if finding else "message"
        raise UsageError("E214", f"There is no {kind} {code.upper()}.", hint=_nearest(code))
    color, short = colored(sys.stdout), finding and not verbose
    text = in_short(text) if short else text
    folder = "findings/" if finding else ""
    say(sheet(text, color=color, width=width(sys.stdout), folder=folder), codes=color)
    if short:
        say(f"\n  more    recompute-scan explain -v {code.upper()}\n")
    return 0


def _list_codes() -> int:
    from recompute_scan.report.blocks import wrap

    for code, name in titles().items():
        say(f"{code}  {name}\n")
    say("\n".join(wrap(", ".join(messages()), " " * 10, "Messages: ")) + "\n")
    return 0


def _nearest(code: str) -> str:
    """Codes that may be meant, and how to see all."""
    known = titles() if code.upper().startswith("RS") else messages()
    return f"{meant(code.upper(), known)}recompute-scan explain lists all codes"


_COLORS = {"ok": "green", "missing": None, "problem": "red"}
_WIDTH = 80


@click.command(cls=Grouped, short_help="List what is installed, and what it allows.")
@debug_option
def doctor() -> int:
    """Look at what is installed: torch and its GPUs, launchers, the optional packages.

    A line that begins with `missing` names something that only some uses need.
    """
    import textwrap

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


@click.command(cls=Grouped, short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script that lets SHELL complete commands, options and files.

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


State = Literal["ok", "missing", "problem"]

# Importing torch takes seconds on a cold disk; longer than this it hangs.
_TORCH_TIMEOUT_S = 120
# In another process: a broken torch ends only that process, and its memory is freed.
# `python -c` looks for modules in the folder where it is started first, which may be a stranger's.
_ASK_TORCH = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "activities": sorted(each.name for each in torch.profiler.supported_activities()),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cuda else [],
    "built_for": torch.version.cuda or torch.version.hip,
}))
"""
# Distributions, one is enough; the extra that brings them; the feature that needs them.
_EXTRAS = (
    (("transformers",), "examples", "examples"),
    (("fsspec",), "remote", "remote traces"),
    (("distributed",), "dask", "Dask (--dask)"),
    (("traceinsight", "HolisticTraceAnalysis"), "hta", "HTA (--hta)"),
)


class Installed(NamedTuple):
    """One thing that was looked at.

    Attributes:
        state: ``missing`` is a choice, ``problem`` something to mend.
        purpose: What it is needed for.
        found: The version or device, or the advice.
    """

    state: State
    purpose: str
    found: str


def look() -> list[Installed]:
    """Everything that decides what can be done here, the most needed first."""
    return [_reading(), *_recording(), _launchers(), *map(_extra, _EXTRAS), _py_spy()]


def heading() -> str:
    """The tool, the interpreter and the machine, in one line."""
    about = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"recompute-scan {version('recompute-scan')}, {about}"


def _reading() -> Installed:
    packages = ("numpy", "msgspec", "isal", "zstandard")
    said = ", ".join(f"{name} {version(name)}" for name in packages)
    return Installed("ok", "analyze", said)


def _recording() -> list[Installed]:
    purpose = "run"
    missing = [name for name in ("torch", "wrapt") if _version_of(name) is None]
    if missing:
        said = f"no {' and no '.join(missing)}; {how_to_add('torch')}"
        return [Installed("missing", purpose, said)]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, and words of ours
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        said = f"torch does not start within {_TORCH_TIMEOUT_S} s"
        return [Installed("problem", purpose, said)]
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
        return [Installed("problem", purpose, f"importing torch fails: {last}")]
    except (OSError, ValueError, IndexError) as error:
        return [Installed("problem", purpose, f"torch could not be asked: {error}")]
    return [Installed("ok", purpose, f"torch {found['version']}"), _device(found)]


def _device(found: dict[str, Any]) -> Installed:
    purpose = "GPU activity"
    if found["devices"]:
        first, many = found["devices"][0], len(found["devices"])
        if "CUDA" in found["activities"]:
            return Installed("ok", purpose, f"{many} x {first}")
        said = f"{first} is here, but this torch's profiler cannot record it (no CUPTI)"
        return Installed("problem", purpose, said)
    if found["built_for"]:
        said = "no GPU is seen: CPU operators are recorded"
    else:
        said = "this torch is built for the CPU: CPU operators are recorded"
    return Installed("missing", purpose, said)


def _launchers() -> Installed:
    purpose = "run -- LAUNCHER"
    folders = {sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("-packages"))}
    hooks = [file for folder in folders for file in Path(folder).glob("*.pth") if _is_hook(file)]
    if hooks:
        return Installed("ok", purpose, f"start-up hook {hooks[0].name}")
    said = "recompute_scan.pth is in no site-packages: start the ranks by `run --nproc-per-node`"
    return Installed("problem", purpose, said)


def _is_hook(file: Path) -> bool:
    from recompute_scan.startup import VARIABLE

    try:
        return VARIABLE.encode() in content(file)
    except OSError:
        return False


def _extra(wanted: tuple[tuple[str, ...], str, str]) -> Installed:
    names, extra, purpose = wanted
    for name in names:
        if found := _version_of(name):
            return Installed("ok", purpose, f"{name} {found}")
    return Installed("missing", purpose, how_to_add(extra))


def _py_spy() -> Installed:
    purpose = "stacks of a hang"
    if program := shutil.which("py-spy"):
        return Installed("ok", purpose, program)
    return Installed("missing", purpose, "native frames need py-spy: pip install py-spy")


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def page(code: str) -> str | None:
    """The page of the finding with this code, as Markdown; ``None`` where there is none."""
    return _pages().get(code.upper())


def titles() -> dict[str, str]:
    """The name of every finding by its code, in order of the codes."""
    return {
        code: text.partition("\n")[0][len("# RS000 ") :].strip() for code, text in _pages().items()
    }


@cache
def _pages() -> dict[str, str]:
    paths = sorted((_docs() / "findings").glob("RS*.md"))
    return {path.stem: path.read_text(encoding="utf-8").rstrip("\n") + "\n" for path in paths}


def _docs() -> Path:
    """The folder of the pages, in an installed package or in a checkout."""
    here = Path(__file__).parents[1]
    installed = here / "docs"
    return installed if installed.is_dir() else here.parents[1] / "docs"


def messages() -> dict[str, str]:
    """The documentation of every error, by its code, heading first."""
    path = _docs() / "messages.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = re.split(r"^(?=#{2,3} )", page, flags=re.MULTILINE)
    return {part[4:8]: part for part in parts if part.startswith("### E")}
