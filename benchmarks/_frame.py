"""What every benchmark shares: its command, clean processes, runs in turn, ratios and tables."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import click
import numpy as np
import numpy.typing as npt

from benchmarks._machine import children

Way = TypeVar("Way")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]
Floats = npt.NDArray[np.float64]

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
TRACES = ROOT / "traces"
TIMEOUT_S = 900
#: Start of a command line that runs the tool in a process of its own.
TOOL = (sys.executable, "-m", "recompute_scan")
_DRAWS = 1000


def benchmark(function: Callable[..., int | None]) -> click.Command:
    """The command of a benchmark's module, whose ``--help`` is the module's docstring.

    The function's result is the exit status; ``None`` is 0.
    """
    text = sys.modules[function.__module__].__doc__ or ""
    # Click rewraps paragraphs but those behind this mark: examples stay as they are.
    text = re.sub(r"\n\n(?= )", "\n\n\b\n", text)
    settings = {"help_option_names": ["-h", "--help"], "show_default": True}
    return click.command(help=text, context_settings=settings)(function)


def words(name: str = "words") -> Option:
    """Words on the command line that choose what is run; all of it without one."""
    return click.argument(name, nargs=-1)


class Among(click.ParamType):  # type: ignore[type-arg]
    """Some of the names that are known, with commas between them."""

    name = "A,B,…"

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(known)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        names = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
        if other := [name for name in names if name not in self.known]:
            self.fail(f"{', '.join(other)}: not among {', '.join(self.known)}", param, ctx)
        return names


def some(name: str, among: Iterable[str], *, text: str, default: Iterable[str] = ()) -> Option:
    """An option for some of the names, with commas between them; without a default, for all."""
    known = list(among)
    chosen = ",".join(default or known)
    return click.option(name, type=Among(known), default=chosen, show_default=False, help=text)


def folder_option(*names: str, text: str) -> Option:
    """An option that names a folder or a file."""
    return click.option(*names, type=click.Path(path_type=Path), help=text)


def wanted(name: str, said: Sequence[str]) -> bool:
    """Whether the name holds one of the words; any does where there are none."""
    return not said or any(word in name for word in said)


def call(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status. What was typed wrongly is said, and the status is 2."""
    try:
        return int(command.main(arguments, standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130


@contextlib.contextmanager
def kept_in(folder: Path | None) -> Iterator[Path]:
    """That folder, made where it is missing; without one, a temporary folder."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextlib.contextmanager
def saved(name: str | None) -> Iterator[None]:
    """What is printed meanwhile also goes to that file of ``benchmarks/results``."""
    if name is None:
        yield
        return
    with (
        (RESULTS / name).open("w", encoding="utf-8") as file,
        contextlib.redirect_stdout(_Both(sys.stdout, file)),
    ):
        yield


class _Both(io.TextIOBase):
    def __init__(self, *files: IO[str]) -> None:
        self._files = files

    def write(self, text: str) -> int:
        for file in self._files:
            file.write(text)
        return len(text)

    def flush(self) -> None:
        for file in self._files:
            file.flush()


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    status: int
    output: str
    seconds: float


def surroundings(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a clean process: one thread, bytecode on disk, this Python's programs
    first, and the checkout's packages importable from any folder.
    """
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }


def fresh(
    command: Sequence[str | Path],
    *,
    folder: Path = ROOT,
    timeout_s: float = TIMEOUT_S,
    variables: Mapping[str, str] | None = None,
) -> Ran:
    """Run a program in a clean process; its output and errors together, in order.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        timeout_s: A program that takes longer is ended, and all below it; its status is 124.
        variables: Set in its environment.
    """
    began = time.monotonic()
    with subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        env=surroundings(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for pid in (*children(process.pid), process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            said, _ = process.communicate()
            return Ran(124, f"{said}\nended after {timeout_s:g} s", time.monotonic() - began)
    return Ran(process.returncode, said, time.monotonic() - began)


def told(command: Sequence[str | Path], *, timeout_s: float = TIMEOUT_S) -> Any:
    """What a program prints in its last line as JSON, in a clean process.

    Raises:
        subprocess.CalledProcessError: It failed; what it said is in ``stderr``.
        subprocess.TimeoutExpired: It took longer.
    """
    done = subprocess.run(
        list(map(str, command)),
        env=surroundings(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_turn(ways: Sequence[Way], rounds: int) -> Iterator[Way]:
    """Each of the ways once a round, every other round backwards, so that what else a machine
    does falls on all alike.
    """
    for number in range(rounds):
        yield from ways if number % 2 == 0 else reversed(ways)


def interval(values: Floats, estimate: Callable[[Floats], float]) -> tuple[float, float, float]:
    """Of an estimate from these rows: the lower end of its 95 % interval, itself, the upper end.

    By bootstrap: B. Efron, "Bootstrap methods: another look at the jackknife", Ann. Stat. 7, 1979.
    """
    random = np.random.default_rng(0)
    drawn = [estimate(random.choice(values, len(values))) for _ in range(_DRAWS)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), estimate(values), float(high)


class Table:
    """A table whose rows are printed as they come.

    Args:
        columns: Each column's head with the format of its cells (``<34``, ``>8.2f``), as text with
            bars between: ``case <34 | step, ms >8.2f``.
        markdown: Whether rows are Markdown's; only the alignment of formats counts then.
    """

    def __init__(self, columns: Mapping[str, str] | str, *, markdown: bool = False) -> None:
        if isinstance(columns, str):
            found = (one.rpartition(" ") for one in columns.split(" | "))
            columns = {head.strip(): form for head, _, form in found}
        self._formats, self._markdown = list(columns.values()), markdown
        if markdown:
            print("| " + " | ".join(columns) + " |")
            rule = ("---:" if one.startswith(">") else "---" for one in self._formats)
            print("| " + " | ".join(rule) + " |", flush=True)
        else:
            heads = zip(columns, self._formats, strict=True)
            print(" ".join(_cell(head, one) for head, one in heads).rstrip(), flush=True)

    def row(self, *cells: object, note: str = "") -> None:
        """Print a row; text in a column of numbers is put where the number would be."""
        shown = [_cell(cell, one) for cell, one in zip(cells, self._formats, strict=True)]
        if self._markdown:
            print(f"| {' | '.join(cell.strip() for cell in shown)} |{note}", flush=True)
        else:
            print(f"{' '.join(shown)}{note}".rstrip(), flush=True)


def _cell(cell: object, form: str) -> str:
    if cell is None or isinstance(cell, str):
        return format(cell or ("-" if cell is None else ""), re.sub(r"[+]|[.,%a-z].*", "", form))
    return format(cell, form)
