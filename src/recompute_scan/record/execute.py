"""Run a script or module in this process as the interpreter itself would.

The state that Python sets up before it runs a file or ``-m`` module (the command line's
documentation, ``Doc/using/cmdline.rst``, and ``runpy``) is set up here: a real ``__main__`` module,
``sys.argv``, ``sys.path[0]``, ``__file__``, ``__spec__`` and ``__package__``.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import is_
from pathlib import Path
from threading import enumerate as threads_alive
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from recompute_scan.errors import UsageError
from recompute_scan.terminal import file_at, still

_OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
# Recording, or torch's profiler for it, calls functions of these, and scripts replace them: with
# mocks, or by a library that makes time or files up. Hooks are there to be replaced.
_LIBRARY = (
    "ast atexit base64 builtins codecs contextlib copy ctypes datetime faulthandler fnmatch "
    "functools gc glob gzip hashlib importlib inspect io itertools json linecache math "
    "operator os pickle platform posixpath random re select shlex shutil signal stat "
    "statistics struct subprocess tempfile textwrap threading time traceback unicodedata zlib"
)
_OURS = {"_exit", "execv", "execve", "input"}  # Jupyter has another input for each cell
# The others of its module go together: a library that replaces them (gevent) ends by its own.
_OF_THREADS = {"Thread", "Event", "enumerate"}
_BEFORE = tuple(
    (
        owner,
        {
            name: value
            for name, value in vars(owner).items()
            if (callable(value) or isinstance(value, classmethod))
            and not (name.endswith("hook") or name in _OURS)
            and (owner is not threading or name in _OF_THREADS)
            and type(value).__module__ != "unittest.mock"  # our first import may be in a patch
        },
    )
    for owner in (*Path.mro()[:-1], *map(importlib.import_module, _LIBRARY.split()))
)
_GONE = object()


class StopRecording(SystemExit):
    """Raised at a step boundary once everything is recorded, to end the script.

    A ``SystemExit``, so that frameworks and threads treat it as an orderly end.
    """


class Exit(Struct, frozen=True):
    """How the script ended, its exit status as Python gives it, and the error in one line."""

    ending: Literal[
        "finished", "stopped", "exited", "raised", "interrupted", "terminated", "hung", "killed"
    ]
    exit_status: int
    error: str | None = None


class _Program(Struct, frozen=True):
    code: CodeType
    main: ModuleType
    argv0: str


def run_program(
    target: str,
    is_module: bool,
    args: Sequence[str],
    on_failure: Callable[[BaseException], None] = lambda _: None,
) -> Exit:
    """How the program ended; it has run to its end, and what it changed in ``sys`` is put back.

    An uncaught exception is printed as Python prints it, without this package's frames. Then
    ``on_failure`` gets it, or the ``SystemExit`` of a failing exit, while everything that the
    script held is still alive.

    Raises:
        UsageError: There is no such script (``E202``) or module (``E203``).
    """
    threads = set(threads_alive())
    with _interpreter_state():
        ended = _run_program(target, is_module, args, on_failure)
        if ended.ending != "stopped":
            ended = _threads_ended(ended, threads)
    return ended


def _threads_ended(ended: Exit, before: set[threading.Thread]) -> Exit:
    """How the program ended, once its threads that are no daemons have, as Python waits for them.

    One of them may train.
    """
    before.add(threading.current_thread())  # another one by now where a library makes threads up
    try:
        while left := [one for one in threads_alive() if one not in before and not one.daemon]:
            left[0].join()
    except StopRecording:
        return Exit("stopped", 0) if ended.ending == "finished" else ended
    except KeyboardInterrupt:
        return Exit("interrupted", 130)
    return ended


def _run_program(
    target: str, is_module: bool, args: Sequence[str], on_failure: Callable[[BaseException], None]
) -> Exit:
    try:
        program = _load(target, is_module, args)
        sys.modules["__main__"] = program.main
        sys.argv[:] = [program.argv0, *args]
        exec(program.code, program.main.__dict__)  # noqa: S102 - running it is the purpose
    except UsageError:
        raise
    except BaseException as error:
        ended = _ended_by(error, on_failure)
        traceback.clear_frames(error.__traceback__)
        return ended
    return Exit("finished", 0)


def _ended_by(error: BaseException, on_failure: Callable[[BaseException], None]) -> Exit:
    if isinstance(error, KeyboardInterrupt):
        _report(error)
        return Exit("interrupted", 130)
    if _follows_stop(error):
        return Exit("stopped", 0)
    if isinstance(error, SystemExit):
        code = error.code
        status = _exit_status(code)
        if status and not isinstance(code, int):
            print(code, file=sys.stderr)
        if status:
            on_failure(error)
        return Exit("exited", status)
    summary = _report(error)
    on_failure(error)
    return Exit("raised", 1, summary)


def _follows_stop(error: BaseException) -> bool:
    """Is it our end of the recording, or was it raised by a handler that had caught that?"""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, StopRecording):
            return True
        seen.add(id(link))
        link = link.__context__  # also of errors that are raised `from` another
    return False


def run_call(
    call: Callable[[], Any],
    returned: list[Any],
    raised: list[BaseException],
    on_failure: Callable[[BaseException], None],
) -> Exit:
    """How the call ended. Its result or its exception is added to a list of the caller's;
    nothing is printed. ``on_failure`` as for :func:`run_program`.
    """
    try:
        returned.append(call())
    except StopRecording as stop:
        traceback.clear_frames(stop.__traceback__)
        return Exit("stopped", 0)
    except SystemExit as error:
        raised.append(error)
        status = _exit_status(error.code)
        if status:
            on_failure(error)
        return Exit("exited", status)
    except KeyboardInterrupt as error:
        raised.append(error)
        return Exit("interrupted", 130)
    except BaseException as error:
        raised.append(error)
        on_failure(error)
        return Exit("raised", 1, traceback.format_exception_only(type(error), error)[-1].strip())
    return Exit("finished", 0)


def _load(target: str, is_module: bool, args: Sequence[str]) -> _Program:
    if is_module:
        _set_first_path(os.getcwd())  # noqa: PTH109 - text, as below
        sys.argv[:] = ["-m", *args]  # as Python has it while it looks for the module
        spec = _find_spec(target)
        if spec.submodule_search_locations is not None:
            spec = _find_spec(f"{target}.__main__")
        return _module_program(spec, target)
    path = Path(target)
    # Joined as text, as Python does: pathlib would drop the "./" of "./train.py".
    file = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118
    # A folder or an archive with a __main__.py runs like a module.
    if path.is_dir() or (path.is_file() and zipfile.is_zipfile(path)):
        _set_first_path(file)
        found = importlib.machinery.PathFinder.find_spec("__main__", [file])
        if found is None:
            raise UsageError("E202", f"There is no __main__.py in {target}.")
        return replace(_module_program(found, target), argv0=target)
    loader: Any
    if path.suffix == ".pyc" and path.is_file():
        loader = importlib.machinery.SourcelessFileLoader("__main__", file)
        try:
            code = loader.get_code("__main__")
        except (ImportError, EOFError, ValueError, TypeError, OSError) as error:
            raise cannot_open(target, str(error)) from None
        if code is None:
            raise cannot_open(target, "it holds no code")
        _set_first_path(str(path.resolve().parent))
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", file)
        try:
            source = loader.get_data(file)
        except OSError as error:
            raise cannot_open(target, error.strerror) from None
        _set_first_path(str(path.resolve().parent))
        code = compile(source, file, "exec", dont_inherit=True)
    return _Program(code, _main_module(file, loader), target)


def cannot_open(script: str, why: str | None) -> UsageError:
    return UsageError(
        "E202",
        f"Cannot open the script {script}.",
        why=why,
        hint="the tool's options go before the script, the script's own after it",
    )


def _find_spec(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A missing parent is the caller's slip; a missing import inside a parent is the script's.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # such as an empty name
        spec = None
    if spec is None:
        why = None
        if name.endswith(".__main__"):
            why = f"{name.removesuffix('.__main__')} is a package without a __main__ module"
        raise UsageError("E203", f"There is no module named {name}.", why=why)
    return spec


def _module_program(spec: importlib.machinery.ModuleSpec, target: str) -> _Program:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType) or spec.origin is None:
        raise UsageError("E203", f"The module {target} has no code that can be run.")
    main = _main_module(spec.origin, spec.loader)
    main.__spec__ = spec
    main.__package__ = spec.parent
    main.__dict__["__cached__"] = spec.cached
    return _Program(code, main, spec.origin)


def _main_module(file: str, loader: object) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __annotations__={}, __builtins__=builtins, __cached__=None, __file__=file, __loader__=loader
    )
    return main


def _set_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11: -P leaves sys.path alone
        sys.path[0] = folder


@contextmanager
def _interpreter_state() -> Iterator[None]:
    modules, argv, path = dict(sys.modules), list(sys.argv), list(sys.path)
    deep = sys.getrecursionlimit()
    streams = [(sys.stdout, 1, file_at(1)), (sys.stderr, 2, file_at(2))]
    hooks = {name: list(getattr(sys, name)) for name in ("meta_path", "path_hooks")}
    try:
        yield
    finally:
        # Python waits for threads before it calls these functions.
        found = [one for one in replaced() if one[0] is not threading]
        _put(found, 0)
        atexit.register(_put, found, 1)
        _stop_timers()
        atexit.register(sys.setrecursionlimit, now_deep := sys.getrecursionlimit())
        sys.setrecursionlimit(max(deep, now_deep))
        # The answer goes to the terminal, whatever the script writes to.
        theirs = sys.stdout, sys.stderr
        atexit.register(_print_to, *theirs)
        _print_to(*map(_answering, streams, theirs))
        # The script may refuse no import and no file of ours from here on, also by a module that is
        # `None`. Functions that it has left for the interpreter's end find all of it again.
        for now, before in ((getattr(sys, name), before) for name, before in hooks.items()):
            atexit.register(now.__setitem__, slice(None), list(now))
            now[:] = before
            sys.path_importer_cache.clear()  # what it holds may have found no hook
        names = [
            n
            for n, one in list(sys.modules.items())
            if modules.get(n, 0 if one is None else one) is not one
        ]
        atexit.register(sys.modules.update, {name: sys.modules.pop(name) for name in names})
        sys.modules.update(modules)
        sys.argv[:] = argv
        sys.path[:] = path


def replaced() -> list[tuple[Any, str, Any, Any]]:
    """Functions that the script has replaced: owner, name, the one before it, the one now."""
    return [
        (owner, name, was, now)
        for owner, names in _BEFORE
        for held in [vars(owner)]
        if not all(map(is_, map(held.get, names), names.values()))  # at every step: no loop
        for name, was in names.items()
        if (now := held.get(name, _GONE)) is not was
    ]


def _put(found: list[tuple[Any, str, Any, Any]], which: int) -> None:
    for owner, name, *values in found:
        if values[which] is _GONE:
            delattr(owner, name)
        else:
            setattr(owner, name, values[which])


@contextmanager
def as_before() -> Iterator[None]:
    """The body finds the standard library as it was before the script, which finds its own again:
    what the script has put there may fail, and may count its calls.
    """
    found = replaced()
    try:
        _put(found, 0)
        yield
    finally:
        # A function that the script has put back meanwhile stays.
        _put([one for one in found if vars(one[0]).get(one[1], _GONE) is one[2]], 1)


def _print_to(*streams: Any) -> None:
    sys.stdout, sys.stderr = streams


def _answering(before: tuple[Any, int, Any], theirs: Any) -> Any:
    """A stream from before the script, the script's own where its descriptor leads elsewhere by
    now, or none where that is closed.
    """
    with suppress(Exception):  # an object of the script's
        theirs.flush()
    return file_at(before[1]) and (still(*before) or theirs)


def _stop_timers() -> None:
    """Stop timers that would interrupt the script, which is over."""
    faulthandler.cancel_dump_traceback_later()
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        if hasattr(signal, name):
            signal.setitimer(getattr(signal, name), 0)


def _exit_status(code: object) -> int:
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _report(error: BaseException) -> str:
    _leave_out_own_frames(error, set())
    sys.excepthook(type(error), error, error.__traceback__)
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]


def _leave_out_own_frames(error: BaseException, seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    trace = error.__traceback__
    # Errors that our code raises keep their frames; these are the script's, or the user's.
    if isinstance(error, (SyntaxError, KeyboardInterrupt)) or not ends_in_own_frame(trace):
        error.__traceback__ = _without_own_frames(trace)
    for chained in (error.__cause__, error.__context__):
        if chained is not None:
            _leave_out_own_frames(chained, seen)


def ends_in_own_frame(trace: TracebackType | None) -> bool:
    """Whether code of this package raised it, or no code at all."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is None or is_own(trace.tb_frame)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    links = []
    while trace is not None:  # a loop: this may be the trace of a RecursionError
        if not is_own(trace.tb_frame):
            links.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for link in reversed(links):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN_FOLDER)
