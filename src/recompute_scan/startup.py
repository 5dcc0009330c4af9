"""How the Python processes of a run take part in its recording by themselves.

``recompute-scan run -- torchrun train.py`` starts the launcher with :data:`VARIABLE` set. Every
Python that starts below it reads ``recompute_scan.pth``, one line next to the installed packages,
which does nothing without the variable. With it, a process that runs a script of the user's is
replaced, before any of its code has run, by ``recompute-scan run … SCRIPT``: same
process id, same environment, same arguments. Launchers themselves, data-loader workers, compile
workers and other tools run on as they are.

Standard library only, and harmless without torch: what a process that the script starts with
multiprocessing runs in place of its target (:class:`Recorded`) is sent there by pickle, and brings
torch into none that has not imported it by itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

# Holds the options for the processes that join, as text that is passed on unread.
VARIABLE = "RECOMPUTE_SCAN_JOIN"
# The file that processes of ours start by.
MAIN = str(Path(__file__).with_name("__main__.py"))

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
# Programs that are no training, by the first names of their modules; frameworks' launchers too.
_TOOLS = ("multiprocessing", "joblib", "ipykernel", "pip", "recompute_scan")


def join() -> None:
    """Become a recorded run of the same script, where this process is to take part."""
    options = os.environ.pop(VARIABLE, None)
    if options is None:
        return
    folders = [sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib", "stdlib")]
    folders.append(os.path.dirname(sys.executable))  # noqa: PTH120 - links are not followed
    command = joined(sys.orig_argv, options, folders)
    if command is None:
        os.environ[VARIABLE] = options  # for those that this process starts
    else:
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - the same interpreter


def run_as_it_is() -> NoReturn:
    """Become the script that this process was to record: its options make no sense, such as a
    variable that an earlier run has left.
    """
    words = f"{VARIABLE} is damaged or from another version: unset it; the script is not recorded"
    print(f"recompute-scan: {words}", file=sys.stderr, flush=True)
    argv = sys.orig_argv
    at = argv.index("--handed-on")  # behind MAIN and "run", with its value
    command = [sys.executable, *argv[1 : at - 2], *argv[at + 2 :]]
    os.execv(sys.executable, command)  # noqa: S606 - the same interpreter


def joined(argv: Sequence[str], options: str, tool_folders: Sequence[str]) -> list[str] | None:
    """The interpreter's new arguments, or ``None`` where the process is not to take part.

    Args:
        argv: The process's whole command line, the interpreter first.
        options: The options for ``recompute-scan run``, as
            :mod:`recompute_scan.record.options` encodes it.
        tool_folders: Scripts in these folders are tools: installed packages and programs.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        flag = argv[at]
        if flag in _WITH_VALUE:
            at += 2
            continue
        # Flags may come together, and what takes an argument ends them: -um pkg, -c code.
        letters = flag[1:] if not flag.startswith("--") else ""
        ends = next((place for place, letter in enumerate(letters) if letter in "cmWX"), None)
        if ends is not None and letters[ends] in "cm":
            if letters[ends] == "c":
                return None
            module, rest = letters[ends + 1 :], list(argv[at + 1 :])
            if not module:
                if not rest:
                    return None
                module = rest.pop(0)
            if _is_tool(module):
                return None
            before = ["-" + letters[:ends]] if ends else []
            return [*argv[1:at], *before, *_run(options), "-m", module, *rest]
        at += 1
    if at >= len(argv) or argv[at] in ("-", MAIN):
        return None
    script = Path(argv[at]).absolute()
    if any(script.is_relative_to(folder) for folder in tool_folders):
        return None
    return [*argv[1:at], *_run(options), *argv[at:]]


def _run(options: str) -> list[str]:
    return [MAIN, "run", "--handed-on", options]


def _is_tool(module: str) -> bool:
    # Every Python process that is started imports this module; few come this far.
    from recompute_scan.frameworks.registry import LAUNCHERS  # noqa: PLC0415

    return any(module == tool or module.startswith(f"{tool}.") for tool in (*_TOOLS, *LAUNCHERS))


class Recorded(Struct, frozen=True):
    """The target, recorded where it trains.

    Attributes:
        target: What the script gave.
        options: How to record it, as :mod:`recompute_scan.record.options` encodes it.
        number: How many such processes the script had started before.
        module: The module that has ``run_here``, imported only where torch is.
    """

    target: Callable[..., Any]
    options: str
    number: int
    module: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, and leave its traces and run record in the run's folder."""
        if "torch" not in sys.modules:
            return self.target(*args, **kwargs)
        run_here = importlib.import_module(self.module).run_here
        return run_here(self.target, args, kwargs, self.options, self.number)
