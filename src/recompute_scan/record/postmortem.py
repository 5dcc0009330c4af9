"""What a failing process still knows: the exception, where it is, its models, its memory."""

from __future__ import annotations

import linecache
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from recompute_scan.crash import Frame, ModelState, Raised, RankEnd
from recompute_scan.diagnose.logs import read_log
from recompute_scan.diagnose.places import user_place
from recompute_scan.fidelity.module_tree import named_parts, weights
from recompute_scan.frameworks.known import engines
from recompute_scan.record.execute import OWN_FOLDER
from recompute_scan.record.module_names import real_class_name, root_modules

_MOST_FRAMES = 200
_LONGEST_MESSAGE = 20_000
_MOST_MODELS = 4
_PARALLEL = engines()


def end_of(
    error: BaseException, steps: int, notes: Iterable[str], regions: dict[str, int]
) -> RankEnd:
    """This rank's end, told from the exception while what it refers to is still alive."""
    errors = chain_of(error)
    stack = errors[-1].frames if errors else ()
    return RankEnd(
        rank=None,
        ending="exited" if isinstance(error, SystemExit) else "raised",
        at=time.time(),
        place=user_place(stack),
        errors=errors,
        stack=stack,
        steps=steps,
        memory=memory(),
        models=model_states(),
        notes=tuple(notes),
        regions=dict(regions),
    )


def chain_of(error: BaseException) -> tuple[Raised, ...]:
    """The exception with those that led to it, the first raised first.

    A traceback that another process sent inside a message (``torch.multiprocessing.spawn``, Ray)
    counts as an exception of its own.
    """
    chain: list[Raised] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        following = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if isinstance(link, SystemExit):  # an exit on account of what came before, if anything
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
    try:
        message = str(error)
    except Exception:  # somebody else's __str__
        message = ""
    return Raised(
        f"{module}{kind.__qualname__}", message[:_LONGEST_MESSAGE], _frames(error.__traceback__)
    )


def _frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    # A loop of our own: StackSummary would keep every frame of a RecursionError's thousands.
    found: list[tuple[FrameType, int]] = []
    while trace is not None:
        if not _is_own(trace.tb_frame):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    if len(found) > _MOST_FRAMES:
        half = _MOST_FRAMES // 2
        found = [*found[:half], *found[-half:]]
    return tuple(_frame(frame, line) for frame, line in found)


def stack_of(thread: int) -> tuple[Frame, ...]:
    """Where a thread of this process is now, outermost frame first."""
    frame = sys._current_frames().get(thread)
    found: list[Frame] = []
    for one, line in traceback.walk_stack(frame) if frame is not None else ():
        if _is_own(one) and one.f_code.co_name == "run_program":
            break  # what is outside is ours and the interpreter's
        if not _is_own(one):
            found.append(_frame(one, line))
    return tuple(reversed(found[:_MOST_FRAMES]))


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OWN_FOLDER)


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
        try:
            free, total = torch.cuda.mem_get_info()
            found |= {
                "cuda_allocated": torch.cuda.memory_allocated(),
                "cuda_peak": torch.cuda.max_memory_allocated(),
                "cuda_reserved": torch.cuda.memory_reserved(),
                "cuda_free": free,
                "cuda_total": total,
            }
        except RuntimeError:  # a GPU that died with the script
            pass
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return found
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


def _size(module: nn.Module) -> int:
    return sum(_numel(parameter) for parameter in weights(module))


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "numel", lambda: 0)())


def _state(root: nn.Module) -> ModelState:
    modules = [part for _, part in named_parts(root)]
    parallel: dict[str, int] = {}
    ways: dict[str, int] = {}
    wrapped = switched = False
    for module in modules:
        kind = type(module).__name__
        if kind in _PARALLEL:
            parallel[_PARALLEL[kind]] = parallel.get(_PARALLEL[kind], 0) + 1
        elif any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            parallel["FSDP2"] = parallel.get("FSDP2", 0) + 1
        if kind == "CheckpointWrapper":
            wrapped = True
            _count(ways, f"checkpoint wrapper around {_inner_class(module)}, {_variant(module)}")
        if vars(module).get("gradient_checkpointing") is True:
            switched = True
            _count(ways, f"gradient_checkpointing on in {real_class_name(module)}")
    configs = (vars(module).get("config") for module in modules)
    caches = [one for config in configs if isinstance(one := _use_cache(config), bool)]
    return ModelState(
        name=real_class_name(root),
        parameters=_size(root),
        trainable=sum(_numel(p) for p in weights(root) if p.requires_grad),
        training=root.training,
        parallel=tuple(f"{number} x {name}" for name, number in parallel.items()),
        checkpoints=tuple(f"{number} x {way}" for way, number in ways.items()),
        wrapped=wrapped,
        switched=switched,
        use_cache=any(caches) if caches else None,
    )


def _count(ways: dict[str, int], way: str) -> None:
    ways[way] = ways.get(way, 0) + 1


def _inner_class(wrapper: nn.Module) -> str:
    inner = wrapper._modules.get("_checkpoint_wrapped_module")
    return real_class_name(inner) if inner is not None else "a module"


def _variant(wrapper: nn.Module) -> str:
    name = getattr(vars(wrapper).get("checkpoint_impl"), "name", "")
    return {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}.get(name, "variant unknown")


def _use_cache(config: object) -> object:
    return None if config is None else getattr(config, "use_cache", None)
