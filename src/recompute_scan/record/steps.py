"""Where one training step ends and the next begins, and which of them are recorded.

A loop may step several optimizers in one iteration (a GAN's two; five times the critic, once
the generator), or one for each parameter while backward runs. The step then ends with the
optimizer that steps least often, and among equals with the one first seen last.
"""

from __future__ import annotations

import gc
import inspect
import math
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal

import torch
from msgspec import Struct, field
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from recompute_scan import _step
from recompute_scan.errors import UsageError
from recompute_scan.intervals import median_interval
from recompute_scan.record.isolation import Call, Guard, Patches, in_forked_processes
from recompute_scan.units import plural

_HAS_CONTEXT: Callable[[int], bool] = getattr(
    torch._C, "_cuda_hasPrimaryContext", lambda device: device == torch.cuda.current_device()
)


def is_capturing() -> bool:
    """Whether work that is given to the GPU now goes into a CUDA graph, and runs later or never."""
    started = torch.cuda.is_initialized()
    return bool(started and torch.cuda.is_current_stream_capturing())


def wait_for_gpus() -> None:
    """Wait until all GPUs that this process uses have done what they were given; begin with none.

    While a CUDA graph is captured nothing may wait, and nothing does.

    Raises:
        RuntimeError: Work that the script gave to one of them has failed. Its next call to that
            GPU fails likewise.
    """
    if not torch.cuda.is_initialized() or is_capturing():
        return
    for device in range(torch.cuda.device_count()):
        if _HAS_CONTEXT(device):  # to wait for another would take memory there
            torch.cuda.synchronize(device)


class StepTimer:
    """Times the steps between boundaries.

    On a GPU an event is recorded on the current stream at each boundary, behind all that the step
    has given to the GPU, and read only after the last: steps are timed as the GPU runs them, one
    behind the other, and nothing waits between them. On a CPU the clock is read.
    """

    _clock = staticmethod(perf_counter)  # not in the module: freezegun replaces it there

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._cuda = device == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """A step begins here, and the one before ends."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(self._clock())

    @property
    def steps(self) -> int:
        return len(self._events or self._times) - 1

    def milliseconds(self, *, wait: bool = True) -> tuple[float, ...]:
        """Duration of each step in ms, in order. Waits for the GPU, or leaves out what it has still
        to do.
        """
        if self._cuda and wait:
            self._events[-1].synchronize()
        events = [event for event in self._events if wait or event.query()]
        if self._cuda:
            return tuple(float(begin.elapsed_time(end)) for begin, end in pairwise(events))
        return tuple((end - begin) * 1e3 for begin, end in pairwise(self._times))


EXPLICIT = "recompute_scan.step()"
_MARK = "_recompute_scan_wrapped"
# Number of the backward pass under way outside any; set in autograd's device threads as well.
_NONE = -1


class StepCounter:
    """Decides which event ends a step. ``steps`` is how often that event was seen so far."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}  # in the order first seen
        self._ender: Hashable | None = None
        self._vacant: list[Hashable] = []
        self._frozen = False

    @property
    def steps(self) -> int:
        """Steps seen so far, as counted by what is now known to end one."""
        return 0 if self._ender is None else self._counts[self._ender]

    @property
    def explicit(self) -> bool:
        return self._ender == EXPLICIT

    def freeze(self) -> None:
        """Settle what ends a step; optimizers not seen until now are ignored from here on."""
        self._frozen = True

    def gone(self, event: Hashable) -> None:
        """An optimizer is no more: the next new one takes its place, with its count.

        Scripts make one anew for each phase, client or task.
        """
        if event in self._counts and event not in self._vacant:
            self._vacant.append(event)

    def saw(self, event: Hashable) -> tuple[bool, bool]:
        """Count one event.

        Returns:
            Whether the event that is taken to end a step has changed, and whether this ends one.
        """
        if event == self._ender and len(self._counts) == 1 and not self._vacant:
            self._counts[event] += 1  # what follows comes to the same, later
            return False, True
        if self.explicit and event != EXPLICIT:
            return False, False
        if event in self._vacant:  # another object at the same address
            self._vacant.remove(event)
        elif self._vacant and event not in self._counts and event != EXPLICIT:
            self._take_place(self._vacant.pop(), event)
        before = self._ender
        if event == EXPLICIT and not self.explicit:
            self._counts = {event: 1}
            self._ender = event
            return before is not None, True
        if self._frozen:
            if event in self._counts:
                self._counts[event] += 1
            return False, event == before
        self._counts[event] = self._counts.get(event, 0) + 1
        fewest = min(self._counts.values())
        self._ender = [key for key, count in self._counts.items() if count == fewest][-1]
        return before is not None and before != self._ender, event == self._ender

    def _take_place(self, old: Hashable, new: Hashable) -> None:
        self._counts = {new if key == old else key: n for key, n in self._counts.items()}
        if self._ender == old:
            self._ender = new


# Hooks that hear nothing any more, to be taken out of torch's list before the next is put in.
_GONE: list[Any] = []


class StepHooks(Struct, eq=False, weakref=True):
    """Turns optimizer steps and ``recompute_scan.step()`` into calls at step boundaries.

    torch's global optimizer hooks run inside the profiler range of the optimizer's step, and
    older versions of ``torch.compile`` take them out. So each optimizer class's ``step`` gets a
    wrapper of ours around torch's own when the first of its kind is made, and the global hook
    serves optimizers that escaped it. A step that is compiled itself is not seen.

    ``_boundary`` is called where a step has ended, and may raise to end the script; ``_restart``
    where another optimizer ends the step than was thought, so that earlier boundaries were wrong.
    Both are called outside any running backward pass, with nothing between them and the script but
    what the hooks are called through.
    """

    _counter: StepCounter
    _boundary: Callable[[], None]
    _restart: Callable[[], None]
    _guard: Guard
    records: bool = True
    _optimizers: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _gone: deque[int] = field(default_factory=deque)  # weak references call back in any thread
    # Threads inside our wrapper of an optimizer's step.
    _stepping: set[int] = field(default_factory=set)
    _restart_due: bool = False
    _boundary_due: bool = False
    _active: bool = False
    _waits_for_backward: bool = False
    _handle: Any = None
    _patches: Patches = field(default_factory=Patches)

    def install(self) -> None:
        """Begin to listen. Optimizers made before this call are heard by the global hook."""
        self._active = True
        _LISTENING.add(self)
        while _GONE:
            _GONE.pop().remove()
        self._handle = register_optimizer_step_post_hook(self._guard.aside(self._saw_step_of))
        name = "_patch_step_function"
        if hasattr(Optimizer, name):
            ours = self._patch_step_function
            self._patches.wrap(self._guard, Optimizer, name, ours, vital=True)
        saw = self._guard.aside(partial(self._saw, EXPLICIT))
        listeners = _step.listeners
        listeners.append(saw)
        self._patches.add(partial(listeners.remove, saw))

    def adopt(self) -> None:
        """Wrap the steps of the optimizers that exist already, too.

        The global hook hears them inside the profiler's range of their step, where no profiler can
        end cleanly. A learning rate scheduler gives its optimizer another ``step``.
        """
        for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
            kind, own = type(optimizer), vars(optimizer).get("step")
            if own is not None:
                alone = weakref.ref(optimizer)  # it may go before the recording does
                optimizer.step = wrapper = self._wrapped(own, alone)
                self._patches.add(partial(_give_back, alone, own, wrapper))
            elif not getattr(kind.step, _MARK, False):
                self._patches.replace(kind, "step", self._wrapped(kind.step))

    def remove(self, *, later: bool = False) -> None:
        """Stop listening. A wrapped ``step`` that is still referenced passes calls through.

        Args:
            later: Leave torch's list of hooks as it is for now, since torch may be going through
                it, as when the garbage collector calls this.
        """
        self._active = False
        handle, self._handle = self._handle, None
        if handle is not None and later:
            _GONE.append(handle)
        elif handle is not None:
            handle.remove()
        self._patches.undo()

    def _patch_step_function(self, call: Call, optimizer: Any) -> None:
        call(optimizer)
        kind = type(optimizer)
        if self._active and not getattr(kind.step, _MARK, False):
            self._patches.replace(kind, "step", self._wrapped(kind.step))

    def _wrapped(
        self, step: Callable[..., Any], bound: Callable[[], Any] | None = None
    ) -> Callable[..., Any]:
        def ours(call: Call, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            # A step that calls other steps (super().step(), wrappers) is one.
            if not self._active or thread in self._stepping:
                return call(*args, **kwargs)
            self._stepping.add(thread)
            try:
                result = call(*args, **kwargs)
            finally:
                self._stepping.discard(thread)
            self._saw_step_of(args[0] if bound is None else bound())
            return result

        wrapper = self._guard.around(step, ours, vital=True)
        # Code asks for the signature of `step` (GradScaler does); old versions of
        # torch.compile put `__wrapped__` in its place.
        with suppress(ValueError, TypeError):  # a step that is not written in Python
            wrapper.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
        vars(wrapper).pop("__wrapped__")
        setattr(wrapper, _MARK, True)
        return wrapper

    def _saw_step_of(self, optimizer: Any, *_: Any) -> None:
        if not self._active or threading.get_ident() in self._stepping:
            return  # it is over, or our wrapper says it
        while self._gone:
            event = self._gone.popleft()
            self._optimizers.pop(event, None)
            self._counter.gone(event)
        event, gone = id(optimizer), self._gone  # no reference to these hooks
        if event not in self._optimizers:
            with suppress(TypeError):  # without room for weak references
                self._optimizers[event] = weakref.ref(optimizer, lambda _: gone.append(event))
        self._saw(event)

    def _saw(self, event: Hashable) -> None:
        if not self._active or is_capturing():  # what is captured is no step: it has not run
            return
        changed, ended = self._counter.saw(event)
        self._restart_due |= changed
        # After a change the boundaries before it were wrong ones, a waiting one too.
        self._boundary_due = ended or (self._boundary_due and not changed)
        if not (self._restart_due or self._boundary_due):
            return
        if in_backward():
            self._wrap_backward()
        else:
            self._fire()

    def _fire(self) -> None:
        restart, self._restart_due = self._restart_due, False
        boundary, self._boundary_due = self._boundary_due, False
        if restart:
            self._restart()
        if boundary:
            self._boundary()

    def _wrap_backward(self) -> None:
        # Inside a running backward nothing may be raised and no profiler started or stopped, so
        # the boundary waits for it to return. Only scripts that step there get this wrapper.
        if self._waits_for_backward:
            return
        self._waits_for_backward = True

        def backward(call: Call, *args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            due = self._restart_due or self._boundary_due
            if due and self._active and not in_backward():
                self._fire()
            return result

        self._patches.wrap(self._guard, torch.autograd, "backward", backward, vital=True)


def _give_back(alone: Callable[[], Any], own: Callable[..., Any], ours: object) -> None:
    """Give an optimizer its own step again, unless others have replaced ours or it is gone."""
    optimizer = alone()
    if optimizer is not None and vars(optimizer).get("step") is ours:
        optimizer.step = own


# Asking for the process's number in every step would take longer than all else that is done there.
_LISTENING: weakref.WeakSet[StepHooks] = weakref.WeakSet()
# Fitted models that try their checkpoints now, from step to step: recordings wait for these.
settling: weakref.WeakSet[Any] = weakref.WeakSet()


def is_recorded() -> bool:
    """Whether something in this process listens that may run a profiler or compare steps."""
    return any(hooks.records and hooks._handle is not None for hooks in list(_LISTENING))


def _forked() -> None:
    """A forked process has no recorder."""
    for hooks in list(_LISTENING):
        hooks._active = False


in_forked_processes(_forked)


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return current_pass() is not None


def current_pass() -> int | None:
    """Number of the backward pass under way in this thread, the innermost; ``None`` for none."""
    number = int(torch._C._current_graph_task_id())
    return None if number == _NONE else number


# The first rank, and the one that is furthest from it: another node, another pipeline stage.
DEFAULT = "0,last"

_ITEM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def chosen(text: str, world_size: int) -> frozenset[int]:
    """The ranks that ``text`` names among ``world_size``, 0-based; empty where it names no such.

    Args:
        text: ``all``, or a list with commas of ranks (``3``), ranges with both ends (``8-15``)
            and ``last``.
        world_size: How many ranks there are, at least 1.

    Raises:
        UsageError: The text has another form (``E224``).
    """
    if text == "all":
        return frozenset(range(world_size))
    found: set[int] = set()
    for item in text.split(","):
        if item.strip() == "last":
            found.add(world_size - 1)
            continue
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                "E224",
                f"--ranks {text} names no ranks.",
                hint="use all, or a list such as 0,last or 0,8-15",
            )
        first = int(match[1])
        found.update(range(first, min(int(match[2] or first), world_size - 1) + 1))
    return frozenset(rank for rank in found if rank < world_size)


# A step is watched, and the next one for what it reads of it.
WATCHED = 2
# Steps longer than this warm up once. Timing ends when the interval of the median is no wider than
# this share of it, or after so long.
LONG_S, NARROW, ENOUGH_S = 2.0, 0.02, 60.0


class Plan(Struct, frozen=True):
    """How many optimizer steps each phase takes.

    Attributes:
        warmup: Steps before anything is recorded, at least 1.
        timing: Steps timed without a profiler.
        steps: Steps profiled without stacks; 0 to time steps and profile none.
        fidelity: Whether one more step is compared, where any is profiled, or nothing else is
            done.
        stacks: Whether one more is profiled, with Python stacks.
        watched: Whether two steps more are watched for unused work.
        fewest: Warm-up and timed steps that are made at least; fewer than all where long steps
            warm up once, and timing ends as soon as the median is known.
    """

    warmup: int
    timing: int
    steps: int
    fidelity: bool = False
    stacks: bool = True
    watched: bool = False
    fewest: tuple[int, int] | None = None

    @property
    def lead(self) -> int:
        """Steps that warm the profiler up: one more after timed steps, else the last warm-up
        step serves, and with a single warm-up step there is none.
        """
        return 1 if self.timing else 0

    @property
    def only_compares(self) -> bool:
        return self.fidelity and not (self.steps or self.timing)

    @property
    def wanted(self) -> int:
        """Steps that a complete recording takes, those with stacks and compared included."""
        return self.warmup + self.timing + self.after_timing

    @property
    def after_timing(self) -> int:
        if not self.steps:
            return int(self.only_compares)
        return self.lead + self.steps + self.behind_profiled

    @property
    def behind_profiled(self) -> int:
        """Steps behind the profiled ones without stacks."""
        return self.stacks + self.fidelity + WATCHED * self.watched

    @property
    def least(self) -> int:
        """Steps that a complete recording takes at least."""
        return sum(self.fewest or (self.warmup, self.timing)) + self.after_timing

    def at(self, made: int, step_s: float) -> tuple[str, str]:
        """``step 2 of at most 13`` and ``about 90 s left``, where a step takes so long."""
        warmup, timing = self.fewest or (self.warmup, self.timing)
        if step_s <= LONG_S:
            warmup = self.warmup
        timing = max(timing, min(self.timing, math.ceil(ENOUGH_S / max(step_s, 1e-3))))
        left_s = step_s * max(1, warmup + timing + self.after_timing - made)
        left = f"{max(left_s, 1):.0f} s" if left_s < 100 else f"{left_s / 60:.0f} min"
        most = "at most " * (self.least < self.wanted)
        return f"step {made} of {most}{self.wanted}", f"about {left} left"

    def is_timed(self, times_ms: Sequence[float]) -> bool:
        fewest = self.timing if self.fewest is None else self.fewest[1]
        if not fewest <= len(times_ms) < self.timing:
            return len(times_ms) >= self.timing
        low, high = median_interval(times_ms)
        return high - low <= NARROW * low or sum(times_ms) >= 1e3 * ENOUGH_S


class Seen(Struct, frozen=True):
    """How far a recording came: optimizer steps made, complete ones profiled, stacks or not.

    ``waited`` is whether a profiler of the script was in the way, ``held`` how many of the steps
    :data:`settling` took.
    """

    made: int
    profiled: int
    stacks: bool
    explicit: bool = False
    waited: bool = False
    held: int = 0


class Wording(Struct, frozen=True):
    """How a person asked for the recording, for messages to them.

    Attributes:
        who: Who made the steps, such as ``The script``.
        no_step: The message where no step was made.
        fits: What to ask for instead, which takes the fewest steps.
    """

    who: str
    no_step: str
    fits: str


COMMAND = Wording(
    who="The script",
    no_step="The script made no optimizer step, so it is not known where a training step ends. "
    "In a loop without a torch.optim optimizer, call recompute_scan.step() at the end of each "
    "step.",
    fits="--quick",
)


def shortfall(plan: Plan, seen: Seen, wording: Wording = COMMAND) -> str | None:
    """Two or three sentences on what is missing and what would fit; ``None`` when nothing is."""
    if seen.made == 0:
        return wording.no_step
    profiled = seen.profiled >= plan.steps
    least = plan.least + seen.held
    whole = seen.stacks or not plan.stacks if plan.steps else seen.made >= least
    if profiled and whole:
        return None
    made = plural(seen.made, "step" if seen.explicit else "optimizer step")
    # It takes more than the fewest where step times vary.
    enough = f"{least} were wanted"
    if seen.made >= least:
        enough = f"a recording takes up to {plan.wanted + seen.held}"
    made = f"{wording.who} made {made}; {enough}."
    if seen.held:
        made += f" recompute_scan.fit measured in {seen.held} of them."
    if plan.steps and profiled:
        return f"{made} Only the Python stacks of the checkpoint calls are missing."
    if seen.profiled:
        made += f" {seen.profiled} of {plan.steps} could be profiled."
    if seen.waited and seen.made - seen.held >= plan.wanted:
        return (
            f"{made} The script runs a torch profiler itself, and torch runs one at a time: "
            "too few steps in a row were left to record. Run the script without its profiler."
        )
    return f"{made} Try {wording.fits}, or a longer run."
