"""Which frame of a stack is the user's own, what the run was doing there, and the stacks that
``faulthandler`` writes, read back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from recompute_scan.crash import Frame
from recompute_scan.frameworks import known
from recompute_scan.frameworks.signature import Where

Activity = Literal[
    "recompute",
    "saving",
    "loading",
    "generation",
    "evaluation",
    "backward",
    "optimizer",
    "wrapping",
]

_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|^<|/lib/python3\.\d+/|/recompute_scan/"
)
_RECOMPUTE = re.compile(
    r"torch/utils/checkpoint\.py:(?:recompute_fn|unpack_hook\w*|check_recomputed\w*)$"
    rf"|{known.either('backward')}"
)
# Of an inference engine, what runs the model or makes room for its cache; it loads weights too.
_ENGINE = re.compile(
    r"(?:^|/)(?:vllm|sglang|lmdeploy)/\S{0,300}:(?:_?(?:execute|forward|generate|sample|dummy_run|capture"
    r"|profile_run|determine_available_memory|warm_?up|run_model|step)\w*|\w*kv_cache\w*)$"
    r"|/generation/utils\.py:"
)
_GENERATES = re.compile(r":_?generate$")
_EVALUATION = re.compile(
    r":_?(?:run_)?(?:evaluate|evaluation|validate|validation|estimate_loss)$"
    r"|:_?(?:\w+_)?(?:val|valid|validate|validation|eval|evaluate|evaluation|prediction|test)"
    r"_(?:one_)?(?:epoch|step|loop)$|:(?:\w+_)?(?:val|validate|eval|evaluate)_model$"
    r"|/trainer\.py:predict$"
)
_BACKWARD = re.compile(
    r"torch/_tensor\.py:backward$|torch/autograd/(?!grad_mode)\w+\.py:\w*(?:backward|grad)$"
)
_OPTIMIZER = re.compile(
    r"torch/optim/\w{1,80}\.py:(?!\w{0,80}(?:cast|process_value|load)\w*$)"
    r"|(?:^|/)\w{0,80}(?:adam|optim|sgd|lion|muon|adafactor)\w{0,80}\.py:step$"
    rf"|{known.either('stepping')}"
)
_WRAPPING = re.compile(r"fsdp/(?:_init_utils|wrap)\.py:|fsdp/\w+\.py:_init_(?:flat_)?param\w*$")
_FORWARD = re.compile(r"torch/nn/modules/module\.py:_?\w*call\w*$|:forward$")

_SAVES = {"save", "saves", "saving"}
_NO_SAVE = {"maybe", "load", "restore", "resume", "evaluate", "eval", "validate", "log", "should"}
_NO_SAVE |= {"backward", "forward", "hooks"}
_LOADS = {"load", "loads", "reload", "restore", "resume", "pretrained"}
_NO_LOAD = {"data", "dataset", "datasets", "batch", "image", "images", "sample", "item", "example"}
_STATE = re.compile(r"^(?:\w+_)?state_dict$")
# What a save does with a sharded or a written state; a name alone is no sign of it.
_GATHERS = re.compile(
    r":(?:\w+_)?state_dict\w*$|_state_dict_utils\.py:|/_flat_param\.py:|/_optim_utils\.py:"
    r"|:_?(?:summon|unshard|gather|consolidate|zero_to_fp32)\w*$|torch/serialization\.py:"
    r"|/safetensors/|torch/distributed/checkpoint/"
)
_SAVE_CALL = re.compile(r"\bsave\w{0,80}\(")

_WORDS: dict[Activity, str] = {
    "recompute": "while a checkpointed region was recomputed",
    "saving": "while saving",
    "loading": "while loading",
    "generation": "while generating",
    "evaluation": "while evaluating",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "wrapping": "while parameters were wrapped",
}


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside installed packages; ``None`` where there is none."""
    for frame in reversed(frames):
        if not _INSTALLED.search(frame.file.replace("\\", "/")):
            return frame
    return None


def user_place(frames: Sequence[Frame]) -> str | None:
    """``file:line`` of the user's own innermost frame, else of the innermost of all."""
    frame = user_frame(frames) or (frames[-1] if frames else None)
    return frame.place if frame is not None else None


def activity(frames: Sequence[Frame]) -> tuple[Activity, int] | None:
    """What was going on, and the index of the frame that shows it; ``None`` where none does.

    The innermost frame that tells counts: a function that evaluates, called by one that saves
    and evaluates, is evaluating. Where a model is called further in, neither saving nor loading
    goes on, whatever the functions around it are named.
    """
    forward = gathers = False
    for index in range(len(frames) - 1, -1, -1):
        inner = frames[index + 1] if index + 1 < len(frames) else None
        found = _of_frame(frames[index], inner, forward=forward, gathers=gathers)
        if found is not None:
            return found, index
        where = frames[index].site
        forward = forward or _FORWARD.search(where) is not None
        gathers = gathers or _GATHERS.search(where) is not None
    return None


def doing(*wanted: Activity) -> Where:
    """The frame that shows one of these to have been going on."""

    def found(frames: Sequence[Frame]) -> int | None:
        what = activity(frames)
        return what[1] if what is not None and what[0] in wanted else None

    return found


def evaluates(frames: Sequence[Frame]) -> bool:
    """Is any of these the frame of a function that evaluates, whatever it calls?"""
    return any(_EVALUATION.search(frame.site) for frame in frames)


def phase(frames: Sequence[Frame]) -> str | None:
    """What was going on, in words; ``None`` where the frames do not tell."""
    found = activity(frames)
    if found is not None:
        return _WORDS[found[0]]
    return "in the forward pass" if any(_FORWARD.search(one.site) for one in frames) else None


def _of_frame(
    frame: Frame, inner: Frame | None, *, forward: bool, gathers: bool
) -> Activity | None:
    where = frame.site
    if _RECOMPUTE.search(where):
        return "recompute"
    if _ENGINE.search(where) or (forward and _GENERATES.search(where)):
        return "generation"
    if _EVALUATION.search(where):
        return "evaluation"
    if not forward:
        library = _INSTALLED.search(frame.file.replace("\\", "/")) is not None
        if (library or gathers) and _saves(frame, inner):
            return "saving"
        if _loads(frame):
            return "loading"
    if _OPTIMIZER.search(where):
        return "optimizer"
    if _BACKWARD.search(where):
        return "backward"
    return "wrapping" if _WRAPPING.search(where) else None


def _saves(frame: Frame, inner: Frame | None) -> bool:
    words = set(frame.function.lower().split("_"))
    if words & _SAVES and not words & _NO_SAVE and frame.function != "save_on_cpu":
        return True
    # torch.save(model.state_dict(), path): the state is gathered before save is called.
    gathers = inner is not None and _STATE.search(inner.function) is not None
    return gathers and _SAVE_CALL.search(frame.source or "") is not None


def _loads(frame: Frame) -> bool:
    words = set(frame.function.lower().split("_"))
    return bool(words & _LOADS) and not words & _NO_LOAD


_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
)
_WATCHDOG = "recompute_scan/record/watchdog.py"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,18}) in (?P<function>.+)')


def main_stack(text: str) -> tuple[Frame, ...]:
    """Where the main thread stood, outermost frame first; empty where the text holds no stack.

    The main thread is the one that got the signal (``Current thread``), else the oldest, which
    faulthandler lists last. Of several dumps the last counts.
    """
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            threads.append((head["current"] == "Current thread", []))
        elif threads and (match := _FRAME.match(line)) is not None:
            threads[-1][1].append(Frame(match["file"], int(match["line"]), match["function"]))
    # The watchdog's own dump has the watchdog's thread as the current one.
    threads = [one for one in threads if one[1] and not one[1][0].file.endswith(_WATCHDOG)]
    current = [frames for is_current, frames in threads if is_current]
    chosen = current or [frames for _, frames in threads]
    return tuple(reversed(chosen[-1])) if chosen else ()
