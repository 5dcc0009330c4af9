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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from operator import is_
from pathlib import Path
from threading import enumerate as threads_alive
from threading import get_ident
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any, Literal

from msgspec import Struct

from recompute_scan.errors import UsageError

_OWN_FOLDER = str(Path(__file__).resolve().parents[1]) + os.sep
# Recording, or torch's profiler for it, calls functions of these, and scripts replace them: with
# mocks, or by a library that makes time or files up. Hooks are there to be replaced.
_LIBRARY = (
    "ast atexit builtins collections contextlib copy ctypes faulthandler fnmatch functools gc gzip "
    "hashlib importlib importlib.metadata inspect io itertools json linecache logging math os "
    "pathlib platform posixpath re select shutil signal statistics subprocess tempfile textwrap "
    "threading time tokenize traceback uuid warnings zlib"
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
    for owner in (Path, *map(importlib.import_module, _LIBRARY.split()))
)
_GONE = object()
_LISTS = "argv", "path", "meta_path", "path_hooks"


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
    except StopRecording as stop:
        traceback.clear_frames(stop.__traceback__)
        return Exit("stopped", 0)
    except SystemExit as error:
        stopped = _follows_stop(error)
        status = 0 if stopped else _exit_status(error)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        if status:
            on_failure(error)
        traceback.clear_frames(error.__traceback__)
        return Exit("stopped" if stopped else "exited", status)
    except KeyboardInterrupt as error:
        traceback.clear_frames(error.__traceback__)
        return Exit("interrupted", 130)
    except BaseException as error:
        if _follows_stop(error):
            traceback.clear_frames(error.__traceback__)
            return Exit("stopped", 0)
        summary = _report(error)
        on_failure(error)
        traceback.clear_frames(error.__traceback__)
        return Exit("raised", 1, summary)
    return Exit("finished", 0)


def _follows_stop(error: BaseException) -> bool:
    """Was it raised by a handler of the script's that had caught our end of the recording?"""
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
        status = _exit_status(error)
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
        return _module_program(_find_module(target), target)
    path = Path(target)
    # Joined as text, as Python does: pathlib would drop the "./" of "./train.py".
    file = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118
    # A folder or an archive with a __main__.py runs like a module.
    if path.is_dir() or (path.is_file() and zipfile.is_zipfile(path)):
        _set_first_path(file)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [file])
        if spec is None:
            raise UsageError("E202", f"There is no __main__.py in {target}.")
        program = _module_program(spec, target)
        return _Program(program.code, program.main, target)
    if path.suffix == ".pyc" and path.is_file():
        return _compiled_program(target, file)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    try:
        source = loader.get_data(file)
    except OSError as error:
        raise cannot_open(target, error.strerror) from None
    _set_first_path(str(path.resolve().parent))
    main = _main_module(file, loader)
    return _Program(compile(source, file, "exec", dont_inherit=True), main, target)


def _compiled_program(target: str, file: str) -> _Program:
    loader = importlib.machinery.SourcelessFileLoader("__main__", file)
    try:
        code = loader.get_code("__main__")
    except (ImportError, EOFError, ValueError, TypeError, OSError) as error:
        raise cannot_open(target, str(error)) from None
    if code is None:
        raise cannot_open(target, "it holds no code")
    _set_first_path(str(Path(target).resolve().parent))
    return _Program(code, _main_module(file, loader), target)


def cannot_open(script: str, why: str | None) -> UsageError:
    """The error for a script that is not there, or cannot be read."""
    return UsageError(
        "E202",
        f"Cannot open the script {script}.",
        why=why,
        hint="the tool's options go before the script, the script's own after it",
    )


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    spec = _find_spec(name)
    if spec.submodule_search_locations is not None:
        return _find_spec(f"{name}.__main__")
    return spec


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
    modules, deep = dict(sys.modules), sys.getrecursionlimit()
    lists = {name: list(getattr(sys, name)) for name in _LISTS}
    try:
        yield
    finally:
        # The script may refuse no import and no file of ours from here on, also by a module that is
        # `None`. Functions that it has left for the interpreter's end find all of it again.
        theirs, later = _Theirs(), ExitStack()
        # Python waits for threads before it calls these functions.
        found = (one for one in replaced() if one[0] is not threading)
        later.enter_context(_before(theirs, found))
        atexit.register(_give_back, later)
        _stop_timers()
        later.callback(sys.setrecursionlimit, now_deep := sys.getrecursionlimit())
        sys.setrecursionlimit(max(deep, now_deep))
        finder = _Finder(theirs)
        for now, before in ((getattr(sys, name), before) for name, before in lists.items()):
            later.callback(now.__setitem__, slice(None), list(now))
            now[:] = before
        sys.meta_path.insert(0, finder)
        sys.path_importer_cache.clear()  # what it holds may have found no hook
        names = [
            n
            for n, one in list(sys.modules.items())
            if modules.get(n, 0 if one is None else one) is not one
        ]
        later.callback(sys.modules.update, {name: sys.modules.pop(name) for name in names})
        sys.modules.update(modules)


def _give_back(later: ExitStack) -> None:
    later.close()


class _Theirs:
    """Threads that find what the script has put in place: all others that there are, while this
    one works for us, and every one from then on.
    """

    def __init__(self) -> None:
        self._idents = {one.ident for one in threads_alive()} - {get_ident()}
        self.over = False

    def __contains__(self, ident: int) -> bool:
        return self.over or ident in self._idents

    def either(self, was: Any, now: Any) -> Any:
        """The one before the script for us, and the script's for its threads."""
        # `Path` asks whether a class is `Path` itself.
        can = self._idents and now is not _GONE and was is not Path
        return _Either(was, now, self) if can else was


class _Either:
    __slots__ = ("_choose",)

    def __init__(self, was: Any, now: Any, theirs: _Theirs) -> None:
        choose = lambda: now if get_ident() in theirs else was  # noqa: E731
        object.__setattr__(self, "_choose", choose)

    __class__ = property(lambda self: self._choose().__class__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choose(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._choose(), name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._choose()(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        one = self._choose()
        bind = getattr(type(one), "__get__", None)
        return one if bind is None else bind(one, instance, owner)

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, self._choose())

    def __subclasscheck__(self, one: Any) -> bool:
        return issubclass(one, self._choose())

    def __mro_entries__(self, _: object) -> tuple[Any, ...]:
        return (self._choose(),)


class _Finder:
    """Finds modules for these threads as they were found when this was made."""

    def __init__(self, theirs: _Theirs) -> None:
        self._theirs = theirs
        self._finders, self._path = list(sys.meta_path), list(sys.path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Spec by the first finder that knows the module; ``None`` in other threads."""
        for one in self._finders if get_ident() in self._theirs else ():
            places = self._path if path is None and one is PathFinder else path
            if (spec := one.find_spec(name, places, target)) is not None:
                return spec
        return None


def replaced() -> Iterator[tuple[Any, str, Any, Any]]:
    """Functions that this thread finds replaced: owner, name, the one before it, the one now."""
    return (
        (owner, name, was, now)
        for owner, names in _BEFORE
        for held in [vars(owner)]
        if not all(map(is_, names.values(), map(held.get, names)))
        for name, was in names.items()
        if (now := held.get(name, _GONE)) is not was
        and not (type(now) is _Either and now._choose() is was)
    )


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _GONE:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


# Open while a thread works for us.
_OPEN: list[_Theirs] = []


def works_for_us() -> bool:
    """Does this thread work for us now, and not for the script?"""
    return any(get_ident() not in theirs for theirs in _OPEN)


def unless_for_us(hook: Callable[[str, tuple[Any, ...]], object]) -> Callable[..., None]:
    """An audit hook of the script's that sees and forbids what the script does, and nothing that
    we do.
    """

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if not works_for_us():
            try:
                hook(event, args)
            except BaseException as error:
                trace = error.__traceback__
                error.__traceback__ = trace and trace.tb_next
                raise

    return audit


@contextmanager
def as_before() -> Iterator[None]:
    """The body finds the standard library as it was before the script, which finds its own again,
    and in other threads all the time: what it has put there may fail, and may count its calls.
    """
    with _before(_Theirs(), replaced()):
        yield


@contextmanager
def _before(theirs: _Theirs, found: Iterable[tuple[Any, str, Any, Any]]) -> Iterator[None]:
    ours = []
    _OPEN.append(theirs)
    try:
        for owner, name, was, now in found:  # one by one: another thread may put its own back
            ours.append((owner, name, now, one := theirs.either(was, now)))
            _put(owner, name, one)
        yield
    finally:
        _OPEN.remove(theirs)
        theirs.over = True
        for owner, name, now, one in ours:
            # A function that the script has put back meanwhile stays.
            if vars(owner).get(name, _GONE) is one:
                _put(owner, name, now)


def _stop_timers() -> None:
    """Stop timers that would interrupt the script, which is over."""
    faulthandler.cancel_dump_traceback_later()
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        if hasattr(signal, name):
            signal.setitimer(getattr(signal, name), 0)


def _exit_status(error: SystemExit) -> int:
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def _report(error: BaseException) -> str:
    seen: set[int] = set()
    _leave_out_own_frames(error, seen)
    sys.excepthook(type(error), error, error.__traceback__)
    return traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]


def _leave_out_own_frames(error: BaseException, seen: set[int]) -> None:
    if id(error) in seen:
        return
    seen.add(id(error))
    trace = error.__traceback__
    # Errors that our code raises keep their frames; a syntax error of the script is not one.
    if trace is not None and (isinstance(error, SyntaxError) or not _ends_in_own_frame(trace)):
        error.__traceback__ = _without_own_frames(trace)
    for chained in (error.__cause__, error.__context__):
        if chained is not None:
            _leave_out_own_frames(chained, seen)


def _ends_in_own_frame(trace: TracebackType) -> bool:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return is_own(trace.tb_frame)


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
    """Whether the frame runs code of this package."""
    return frame.f_code.co_filename.startswith(_OWN_FOLDER)
