"""The watchdog: ends a run that makes no progress, and shows where every rank was.

A thread looks at the main thread now and then. Progress is a step, or another place of the main
thread in its Python code; in a single process also the use of the processor, since such a
process cannot wait for another. Each rank writes into the run's folder whether it moves. A run
hangs when no rank moves: one that loads data while the others wait for it keeps the run alive.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import linecache
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, process_time, sleep, time
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from recompute_scan.crash import Frame, ModelState, Raised, RankEnd
from recompute_scan.diagnose.checkpoint_errors import NO_INPUT_GRAD
from recompute_scan.diagnose.outcome import read_log
from recompute_scan.diagnose.tracebacks import user_place
from recompute_scan.fidelity.state import named_parts, weights
from recompute_scan.files import append, content, write_whole
from recompute_scan.frameworks.registry import ENGINES
from recompute_scan.record.checkpoint_calls import Probe
from recompute_scan.record.execute import is_own
from recompute_scan.record.isolation import Guard
from recompute_scan.record.launch import RankFacts, rank_facts
from recompute_scan.record.modules import real_class_name, root_modules
from recompute_scan.record.shutdown import place_of
from recompute_scan.record.torch_versions import flight_recorders
from recompute_scan.result.run_record import run_info_name, stacks_text_name

_MOST_FRAMES = 200
_LONGEST_MESSAGE = 20_000
_MOST_MODELS = 4
_VARIANTS = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}


def end_of(error: BaseException, steps: int, probe: Probe) -> RankEnd:
    """This rank's end, from the exception while the objects that it refers to are alive."""
    errors = chain_of(error)
    stack = errors[-1].frames if errors else ()
    return RankEnd(
        rank=None,
        ending="exited" if isinstance(error, SystemExit) else "raised",
        at=time(),
        place=user_place(stack),
        errors=errors,
        stack=stack,
        steps=steps,
        memory=memory(),
        models=model_states(),
        notes=(NO_INPUT_GRAD,) if probe.untrained.suspected else (),
        regions=dict(probe.entered),
    )


def chain_of(error: BaseException) -> tuple[Raised, ...]:
    """The exception with those that led to it, the first raised first.

    A traceback that another process sent inside a message (``torch.multiprocessing.spawn``, Ray)
    counts as a further exception.
    """
    chain: list[Raised] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        following = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if isinstance(link, SystemExit):  # an exit because of an earlier error, if any
            link = following
            continue
        raised = _raised(link)
        chain.append(raised)
        if "Traceback (most recent call last)" in raised.message:
            for failure in read_log(raised.message.encode(errors="replace").splitlines()).failures:
                chain.extend(reversed(failure.errors))
        link = following
    return tuple(reversed(chain))


def _raised(error: BaseException) -> Raised:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    message = ""
    with suppress(Exception):  # somebody else's __str__
        message = str(error)
    return Raised(
        f"{module}{kind.__qualname__}", message[:_LONGEST_MESSAGE], _frames(error.__traceback__)
    )


def _frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    # StackSummary would keep every frame of a RecursionError's thousands.
    found = [(frame, line) for frame, line in traceback.walk_tb(trace) if not is_own(frame)]
    if len(found) > _MOST_FRAMES:
        half = _MOST_FRAMES // 2
        found = [*found[:half], *found[-half:]]
    return tuple(_frame(frame, line) for frame, line in found)


def stack_of(thread: int) -> tuple[Frame, ...]:
    """Where a thread of this process is now, outermost frame first."""
    frame = sys._current_frames().get(thread)
    found: list[Frame] = []
    for one, line in traceback.walk_stack(frame) if frame is not None else ():
        if not is_own(one):
            found.append(_frame(one, line))
        elif one.f_code.co_name == "run_program":
            break  # what is outside is ours and the interpreter's
    return tuple(reversed(found[:_MOST_FRAMES]))


def _frame(frame: FrameType, line: int) -> Frame:
    file = frame.f_code.co_filename
    source = linecache.getline(file, line, frame.f_globals).strip()
    return Frame(_short(file), line, frame.f_code.co_name, source[:300] or None)


def _short(file: str) -> str:
    """The file as seen from the folder that the run was started in, where it lies below that."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def memory() -> dict[str, int]:
    """Bytes in use now and at most, on the GPU that the process uses and in the process."""
    found: dict[str, int] = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU that died with the script
            free, total = torch.cuda.mem_get_info()
            found |= {
                "cuda_allocated": torch.cuda.memory_allocated(),
                "cuda_peak": torch.cuda.max_memory_allocated(),
                "cuda_reserved": torch.cuda.memory_reserved(),
                "cuda_free": free,
                "cuda_total": total,
            }
    with suppress(ImportError):  # not on every system
        import resource  # noqa: PLC0415

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["host_peak"] = peak * (1 if sys.platform == "darwin" else 1024)
    return found


def model_states() -> tuple[ModelState, ...]:
    """The largest models alive: their wrappers for parallel training, their checkpoints."""
    try:
        roots = sorted(root_modules(), key=_size, reverse=True)
        return tuple(_state(root) for root in roots if _size(root))[:_MOST_MODELS]
    except Exception:  # some module that cannot be walked; the exception matters more
        return ()


def _size(module: nn.Module, *, trainable: bool = False) -> int:
    return sum(
        int(getattr(one, "numel", lambda: 0)())
        for one in weights(module)
        if one.requires_grad or not trainable
    )


def _state(root: nn.Module) -> ModelState:
    modules = [part for _, part in named_parts(root)]
    parallel: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    wrapped = switched = False
    for module in modules:
        kind = type(module).__name__
        if kind in ENGINES:
            parallel[ENGINES[kind]] += 1
        elif any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            parallel["FSDP2"] += 1
        if kind == "CheckpointWrapper":
            wrapped = True
            inner = module._modules.get("_checkpoint_wrapped_module")
            name = real_class_name(inner) if inner is not None else "a module"
            way = getattr(vars(module).get("checkpoint_impl"), "name", "")
            variant = _VARIANTS.get(way, "variant unknown")
            ways[f"checkpoint wrapper around {name}, {variant}"] += 1
        if vars(module).get("gradient_checkpointing") is True:
            switched = True
            ways[f"gradient_checkpointing on in {real_class_name(module)}"] += 1
    configs = [vars(module).get("config") for module in modules]
    found = [getattr(one, "use_cache", None) for one in configs if one is not None]
    caches = [one for one in found if isinstance(one, bool)]
    return ModelState(
        name=real_class_name(root),
        parameters=_size(root),
        trainable=_size(root, trainable=True),
        training=root.training,
        parallel=tuple(f"{number} x {name}" for name, number in parallel.items()),
        checkpoints=tuple(f"{number} x {way}" for way, number in ways.items()),
        wrapped=wrapped,
        switched=switched,
        use_cache=any(caches) if caches else None,
    )


HUNG = 124
_SLOWEST_LOOK_S = 5.0
_BUSY = 0.2
# Ranks of another machine may not be seen in this folder; then more patience is needed.
_UNSEEN_PATIENCE = 3.0


class Watchdog:
    """Watches the thread that makes it.

    Args:
        timeout_s: Seconds without progress before the run is ended; 0 for never.
        steps: How many steps were made so far.
        on_hang: Called in the watchdog's thread with this rank's end; must end the process.
        waits: Whether it is no hang that nothing moves here now.
    """

    def __init__(
        self,
        folder: Path,
        timeout_s: float,
        steps: Callable[[], int],
        on_hang: Callable[[RankEnd], None],
        waits: Callable[[], bool] = lambda: False,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard or Guard()
        self._folder = folder
        self._timeout_s = timeout_s or inf
        # Twenty looks a timeout, and one in five seconds at the least.
        self._look_s = max(0.05, min(_SLOWEST_LOOK_S, self._timeout_s / 20))
        self._steps = steps
        self._on_hang = on_hang
        self._waits = waits
        self._main = threading.get_ident()
        self._runs = _thread.allocate_lock()  # of an Event scripts may replace methods
        self._runs.acquire()
        self._leaving = False
        self._beats = 0
        self._seen: dict[int, tuple[object, float]] = {}
        self._file: Any = None

    @property
    def patience_s(self) -> float:
        """How long after this rank the others may take to notice that the run hangs."""
        return 2 * self._look_s + 10

    def start(self) -> None:
        self.keep_stacks_when_terminated()
        # Not a threading.Thread: the script would find it among its own.
        _thread.start_new_thread(self._guard.aside(self._watch), ())

    def let_leave(self) -> None:
        """Wait for the process to end, where the watchdog is about to end it.

        The first rank that leaves wakes the others with an error that does not show the cause.
        """
        while self._leaving:
            sleep(self._look_s)

    def stop(self) -> None:
        """The script has ended by itself: nothing is waited for any more."""
        with suppress(RuntimeError):  # stopped before
            self._runs.release()
        with suppress(OSError):
            _beat_path(self._folder, rank_facts().rank).unlink(missing_ok=True)

    def disarm(self) -> None:
        """All that is to be kept is kept. Until then a launcher may end this rank with SIGTERM
        because another has failed, and its stacks show that it was not the one.
        """
        if self._file is not None:
            _let_go_of_sigterm()
            self._file.close()
            self._file = None
        ranks = rank_facts()
        path = self._folder / stacks_text_name(ranks.rank)
        with suppress(OSError):
            if path.exists() and path.stat().st_size == 0:
                path.unlink()

    def forget(self) -> None:
        """This process was forked from the one that is watched, and is not."""
        self._leaving = False
        if self._file is not None:
            _let_go_of_sigterm()

    def keep_stacks_when_terminated(self) -> None:
        """Keep stacks on SIGTERM, once it is known that there are several ranks."""
        # A launcher ends the other ranks with SIGTERM when one has failed; then this is all that
        # can be had of them. Python's own handlers would not run while a rank waits in C.
        ranks = rank_facts()
        if self._file is not None or ranks.world_size < 2 or not hasattr(faulthandler, "register"):
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        with suppress(OSError, ValueError, RuntimeError):
            self._file = append(self._folder / stacks_text_name(ranks.rank))
            faulthandler.register(signal.SIGTERM, file=self._file, all_threads=True, chain=True)

    def _watch(self) -> None:
        look, timeout = self._look_s, self._timeout_s
        mark, moved_at = self._mark(), monotonic()
        used = process_time()
        told = False
        while not self._runs.acquire(timeout=look):
            self.keep_stacks_when_terminated()
            ranks = rank_facts()
            now, mark_now, used_now = monotonic(), self._mark(), process_time()
            computed = ranks.world_size == 1 and used_now - used > _BUSY * look
            if mark_now != mark or computed or self._waits():
                mark, moved_at, told = mark_now, now, False
            used = used_now
            silent = now - moved_at >= timeout
            self._beat(ranks, silent=silent)
            if not silent:
                continue
            if not told:
                told = True
                self._write_stacks(ranks)
            if self._all_silent(ranks, now, patient=now - moved_at < _UNSEEN_PATIENCE * timeout):
                self._leaving = True
                try:
                    self._on_hang(self._end(ranks))
                finally:
                    self._leaving = False
                return

    def _mark(self) -> object:
        return self._steps(), place_of(self._main)

    def _beat(self, ranks: RankFacts, *, silent: bool) -> None:
        if ranks.world_size == 1:
            return
        self._beats += 1
        beat = json.dumps({"beat": self._beats, "silent": silent})
        with suppress(OSError):
            write_whole(_beat_path(self._folder, ranks.rank), beat.encode())

    def _all_silent(self, ranks: RankFacts, now: float, *, patient: bool) -> bool:
        """Does no other rank move? Those that cannot be seen are waited for as long as patient."""
        for rank in range(ranks.world_size):
            if rank == ranks.rank or (self._folder / run_info_name(rank)).exists():
                continue
            try:
                beat = json.loads(content(_beat_path(self._folder, rank)))
            except (OSError, ValueError):
                if patient:
                    return False
                continue
            number, since = self._seen.get(rank, (None, now))
            if beat["beat"] != number:
                since = now
                self._seen[rank] = (beat["beat"], now)
            # A rank that no longer writes has died, or holds Python's lock for good.
            if not beat["silent"] and now - since < self._timeout_s:
                return False
        return True

    def _end(self, ranks: RankFacts) -> RankEnd:
        stack = stack_of(self._main)
        return RankEnd(
            rank=ranks.rank,
            ending="hung",
            at=time(),
            place=user_place(stack),
            stack=stack,
            steps=self._steps(),
            memory=memory(),
            models=model_states(),
            notes=_last_collectives(),
        )

    def _write_stacks(self, ranks: RankFacts) -> None:
        """Every thread's stack, by faulthandler and py-spy, and the flight recorder's content."""
        path = self._folder / stacks_text_name(ranks.rank)
        with suppress(OSError), append(path) as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(_py_spy())
        with suppress(OSError):
            if (record := flight_record()) is not None:
                write_whole(self._folder / f"flight-rank{ranks.rank}.json", record.encode())


def _py_spy() -> str:
    """The stacks that py-spy sees in this process, with native frames; empty without py-spy."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--native", "--nonblocking", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"\npy-spy:\n{done.stdout}" if done.returncode == 0 else ""


def flight_record() -> str | None:
    """The last collectives of this rank as torch's flight recorder kept them, as JSON.

    ``None`` where there is none: it records only with ``TORCH_FR_BUFFER_SIZE`` (before torch 2.9
    ``TORCH_NCCL_TRACE_BUFFER_SIZE``) set, and only for backends that use it.
    """
    for dump in flight_recorders():
        try:
            raw = dump()
            text = raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
            entries = json.loads(text).get("entries")
        except (RuntimeError, TypeError, ValueError, AttributeError):
            continue
        if entries:
            return text
    return None


def _last_collectives() -> tuple[str, ...]:
    """The flight recorder's entry for this rank's latest collective, in a sentence."""
    record = flight_record()
    if record is None:
        return ()
    last = json.loads(record)["entries"][-1]
    name, number = last.get("profiling_name", "unknown"), last.get("collective_seq_id")
    state = last.get("state", "unknown")
    return (f"torch's flight recorder ends with {name}, number {number} ({state}).",)


def _beat_path(folder: Path, rank: int) -> Path:
    return folder / f".alive-rank{rank}"


def _let_go_of_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else the script's own is in its place
        with suppress(Exception):
            faulthandler.unregister(signal.SIGTERM)
