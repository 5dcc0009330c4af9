"""Isolation: an exception in our hooks never reaches the script.

Every function that a recording puts into the process (in place of another, as a hook, in a thread)
is made by :meth:`Guard.around` or :meth:`Guard.aside`. An exception of ours that gets as far is
a bug of ours: it is kept, the recording ends, and from there on calls go straight through. An
exception of the script's functions passes as it is, and each function is called once, whatever
fails around it.

Functions that wait for the import of a module can stop waiting. wrapt's hooks cannot be taken back,
so each module that was ever waited for gets one hook, which calls the functions that still wait.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import ModuleType, TracebackType
from typing import Any, TypeVar, cast

import wrapt
from msgspec import Struct

from recompute_scan.crash import is_from_handler
from recompute_scan.errors import ScanError
from recompute_scan.record.execute import (
    StopRecording,
    as_before,
    ends_in_own_frame,
    is_own,
    replaced,
)
from recompute_scan.record.torch_versions import (
    compile_frames_by,
    is_compiling,
    is_device_error,
    run_uncompiled,
)

_T = TypeVar("_T")


class Call(Struct, eq=False):
    """A call of the script's function, for ours that is around it.

    Calling this calls the function, and keeps its outcome, so that it need not be called a
    second time if ours fails after it. It is compiled as it would be without us, by ``compiler``.
    """

    _function: Callable[..., Any]
    _compiler: object
    made: bool = False
    result: Any = None
    error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiler is not None:
            return self.instead(self._function, *args, **kwargs)
        self.made = True  # the same, sooner
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def instead(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call another function of the script's in its place."""
        self.made = True
        if self._compiler is not None:
            compile_frames_by(self._compiler)
        try:
            self.result = function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        finally:
            if self._compiler is not None:
                compile_frames_by(None)
        return self.result

    def outcome(self, *args: Any, **kwargs: Any) -> Any:
        if not self.made:
            return self._function(*args, **kwargs)
        if self.error is None:
            return self.result
        # An exception kept by a frame of its traceback would keep all that the frames hold.
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error


class Guard:
    """Separates one recording from the script.

    Attributes:
        failure: What has ended the recording, in one sentence; ``None`` while nothing has.
        is_bug: Whether that is a bug of ours. Else the GPU has failed, which torch reports to
            its next callers: to us, and then to the script.
        on_failure: What ends the recording; called once, in whatever thread the bug showed.
        settle: What is still to be done in another thread, or later; called now and then.
        left_out: What could not be recorded because of something unforeseen, one sentence each.
    """

    def __init__(self, what: str = "the recording") -> None:
        self._what = what
        self.failure: str | None = None
        self.is_bug = False
        self.on_failure: Callable[[], None] = lambda: None
        self.settle: Callable[[], None] = lambda: None
        self.left_out: list[str] = []
        self._uncompiled: object = None

    def around(
        self,
        original: Callable[..., Any],
        ours: Callable[..., Any],
        *,
        named: bool = True,
        vital: bool = False,
        ends: Callable[[Exception], object] | None = None,
    ) -> Callable[..., Any]:
        """A function to put in the place of the original; its calls go through ours.

        Args:
            original: The script's function, or torch's.
            ours: Gets a :class:`Call` of the original, then the arguments.
            named: Whether to give it the original's name, signature and attributes.
            vital: Whether it goes on when the recording has ended, until it fails itself.
            ends: Gets an exception of ours, and ends less than the recording.
        """
        failed = False

        def around(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed
            if is_compiling():  # first of all: a compiler that traces this stops here
                return original(*args, **kwargs)
            if self.failure is not None and (failed or not vital):
                if vital:
                    with suppress(Exception):
                        self.settle()
                return original(*args, **kwargs)
            compiler = compile_frames_by(None)
            call = Call(original, compiler)
            try:
                return ours(call, *args, **kwargs)
            except BaseException as raised:
                if raised is call.error or not self._met(raised, ends):
                    call.error = None
                    hide_own_frames(raised)
                    raise
                failed = True
            finally:
                if compiler is not None:
                    compile_frames_by(compiler)
            # Behind the `except`, so that what the script raises now has no context of ours.
            return call.outcome(*args, **kwargs)

        if around.__code__ is not self._uncompiled:  # which all that this makes have in common
            run_uncompiled(around)
            self._uncompiled = around.__code__
        return functools.wraps(original)(around) if named else around

    def inside(
        self, original: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]
    ) -> Callable[..., Any]:
        """A function to put in the place of the original, with a new context around each run."""

        def run(call: Call, *args: Any, **kwargs: Any) -> Any:
            with context():
                return call(*args, **kwargs)

        return self.around(original, run, named=False)

    def aside(self, ours: Callable[..., object]) -> Callable[..., None]:
        """A function to be called back at an event that takes no answer."""

        def called(_: Call, *args: Any, **kwargs: Any) -> None:
            ours(*args, **kwargs)

        return functools.wraps(ours)(self.around(_nothing, called, named=False))

    def run(self, ours: Callable[[], _T], otherwise: _T) -> _T:
        """The return value of ours, or, if it fails, the other value."""
        compiler = compile_frames_by(None)
        try:
            return ours()
        except BaseException as error:
            if not self._met(error):
                raise
        finally:
            if compiler is not None:
                compile_frames_by(compiler)
        return otherwise

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """The body records something that the recording can do without, such as names.

        The failure may be the script's, since its modules and paths are looked at.

        Args:
            what: What is missing then, as the beginning of a sentence.
        """
        try:
            yield
        except BaseException as error:
            if self.is_scripts(error):
                raise
            text = f"{what}: {_in_a_line(error)} [E703]"
            if text not in self.left_out:
                self.left_out.append(text)

    def _met(self, error: BaseException, ends: Callable[[Exception], object] | None = None) -> bool:
        """Does the exception stay with us? Then the recording has ended with it, or its part."""
        if self.is_scripts(error):
            return False
        if ends is not None:
            ends(cast("Exception", error))
            return True
        if self.failure is None:
            names = ", ".join(f"{owner.__name__}.{name}" for owner, name, *_ in replaced()[:3])
            with as_before():
                own = ends_in_own_frame(error.__traceback__)
                self._end(error, "" if own else _scripts_function(error) or names)
        return True

    def _end(self, error: BaseException, replaced: str) -> None:
        """The recording ends with it, perhaps through these functions of the script."""
        of_device = is_device_error(error)
        lacks = isinstance(error, MemoryError)
        self.is_bug = not (of_device or replaced or lacks)
        where = f"{_in_a_line(error)}{_place(error.__traceback__)}"
        self.failure = f"Recording ended when the GPU failed: {_in_a_line(error)}."
        if replaced and not of_device:
            self.failure = (
                f"Recording failed, perhaps through the script's own {replaced}: {where}."
            )
        elif lacks:
            self.failure = f"Recording ended for lack of host memory: {where}."
        elif self.is_bug:
            went_on = f"A bug in recompute-scan ended {self._what}, and the script went on"
            self.failure = f"{went_on}: {where} [E702]"
        with suppress(Exception):
            self.on_failure()
        if self.is_bug:
            with suppress(Exception):
                # Not into what the script may have put in its place, and reads.
                print(f"recompute-scan: {self.failure}", file=sys.__stderr__, flush=True)

    @staticmethod
    def is_scripts(error: BaseException) -> bool:
        """Is it to be passed on: an interrupt, an exit, a word to the person, the script's own?"""
        if not isinstance(error, Exception) or isinstance(error, (StopRecording, ScanError)):
            return True
        return is_from_handler(error)


class Sheltered(Struct, eq=False):
    """A context manager of ours for a ``with`` statement around the script's code: never fails."""

    _guard: Guard
    _context: AbstractContextManager[Any]
    _entered: bool = False

    def __enter__(self) -> None:
        def enter() -> None:
            self._context.__enter__()
            self._entered = True

        self._guard.run(enter, otherwise=None)

    def __exit__(self, *_: object) -> None:
        if self._entered:
            self._guard.run(lambda: self._context.__exit__(None, None, None), otherwise=None)


def within(
    inner: Generator[None, None, None], context: AbstractContextManager[Any]
) -> Generator[None, None, None]:
    """The generator with a context around its one yield, where the function runs."""
    next(inner)
    try:
        with context:
            yield
    except BaseException as error:
        hide_own_frames(error)
        try:
            inner.throw(error)
        except StopIteration:
            return
        except BaseException as raised:
            hide_own_frames(raised)
            raise
        raise
    for _ in inner:
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


run_uncompiled(_nothing)


def hide_own_frames(error: BaseException) -> None:
    """Take this package's frames off the beginning of a traceback; to be followed by ``raise``.

    The script sees the traceback that it would have without us. A ``raise`` without an exception
    adds no frame, and from Python 3.11 on the interpreter takes the traceback from the exception.
    On 3.10 the outermost frame stays.
    """
    trace = error.__traceback__
    while trace is not None and is_own(trace.tb_frame):
        trace = trace.tb_next
    BaseException.with_traceback(error, trace)  # a class of the script's may refuse attributes


def _in_a_line(error: BaseException) -> str:
    text = ""
    with suppress(Exception):  # somebody else's __str__
        text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _scripts_function(error: BaseException) -> str:
    """The function of the script's own file that raised it, such as an audit hook; or none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    main = getattr(sys.modules.get("__main__"), "__dict__", None)
    return frames[-1].f_code.co_name if frames and frames[-1].f_globals is main else ""


def _place(trace: TracebackType | None) -> str:
    """Where the bug is, for a report of it."""
    with suppress(Exception):  # the script may have replaced what this calls
        last = traceback.extract_tb(trace)[-1]
        return f" ({last.filename.rpartition('/')[2]}:{last.lineno}, {last.name})"
    return ""


Undo = Callable[[], None]
_NOT_ITS_OWN = object()


class _Replaced(Struct, eq=False, weakref=True):
    owner: Any
    name: str
    before: Any
    value: Any

    def undo(self) -> None:
        _REPLACED.discard(self)
        if vars(self.owner).get(self.name) is not self.value:
            # Replaced once more: if by us, what that one puts back is not this.
            for later in list(_REPLACED):
                same = later.owner is self.owner and later.name == self.name
                if same and later.before is self.value:
                    later.before = self.before
        elif self.before is _NOT_ITS_OWN:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


# Not what holds them: the module of a fitted layer goes with its model.
_REPLACED: weakref.WeakSet[_Replaced] = weakref.WeakSet()


class Patches:
    """The replacements so far; :meth:`undo` puts all of them back, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; :meth:`undo` restores the owner's entry, or its absence.

        Whoever replaces it again while ours is there keeps theirs, with ours inside.
        """
        replaced = _Replaced(owner, name, vars(owner).get(name, _NOT_ITS_OWN), value)
        setattr(owner, name, value)
        _REPLACED.add(replaced)
        self._undo.append(replaced.undo)

    def wrap(
        self, guard: Guard, owner: Any, name: str, ours: Callable[..., Any], *, vital: bool = False
    ) -> None:
        """Replace a function by ours, :meth:`Guard.around` it."""
        self.replace(owner, name, guard.around(getattr(owner, name), ours, vital=vital))

    def add(self, undo: Undo) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


_Hook = Callable[[ModuleType], None]
_waiting: dict[str, list[_Hook]] = {}


def after_import(name: str, hook: _Hook) -> Undo:
    """Call ``hook`` with the module once it is imported, or now if it is there already.

    Returns:
        What to call in order to wait no longer.
    """
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return lambda: None
    first = name not in _waiting
    waiting = _waiting.setdefault(name, [])
    waiting.append(hook)

    def imported(module: ModuleType) -> None:
        for one in _waiting.pop(name, []):
            one(module)

    if first:
        wrapt.register_post_import_hook(imported, name)

    def stop() -> None:
        if hook in waiting:
            waiting.remove(hook)

    return stop


def in_forked_processes(function: Callable[[], object]) -> None:
    """Call a function in every process that is forked from this one, now and later.

    It cannot be taken back, so it is to be a module's function that may find nothing to do.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


@functools.cache
def let_forked_processes_end() -> None:
    """To be called before the first profiler starts.

    Kineto then has a thread that waits for ever. In a forked process that thread is not there, and
    the destructor of ``ConfigLoader`` waits for that thread at the process's end, after
    all that Python does there. So such a process ends before the destructors of libraries.
    """
    libc = ctypes.CDLL(None)
    if all(hasattr(libc, name) for name in ("on_exit", "_exit", "fcloseall")):  # glibc's
        # The function that is registered last is called first; each gets the exit status.
        for function in (libc._exit, libc.fcloseall):
            in_forked_processes(functools.partial(libc.on_exit, function, None))
