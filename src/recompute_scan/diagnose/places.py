"""Which frame of a stack is the user's own, and what the run was doing there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recompute_scan.crash import Frame

_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|^<|/lib/python3\.\d+/|/recompute_scan/"
)

_REPLAY = r"torch/utils/checkpoint\.py:(?:recompute_fn|unpack_hook|backward|check_recomputed\w*)$"
_PHASES = tuple(
    (words, re.compile(pattern))
    for words, pattern in (
        ("while a checkpointed region was replayed", _REPLAY),
        ("while saving", r":_?(?:\w+_)?save(?:_\w+)?$|:_?(?:\w+_)?state_dict(?:_impl)?$"),
        ("in the backward pass", r"torch/autograd/\w+\.py:|torch/_tensor\.py:backward$"),
        ("in the optimizer's step", r"torch/optim/\w+\.py:"),
        ("while parameters were wrapped", r"fsdp/_(?:init_utils|flat_param)\.py:"),
        ("in the forward pass", r"torch/nn/modules/module\.py:_?\w*call\w*$|:forward$"),
    )
)


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


def phase(frames: Sequence[Frame]) -> str | None:
    """What was going on, in words; ``None`` where the frames do not tell."""
    places = [f"{frame.file}:{frame.function}" for frame in frames]
    for words, pattern in _PHASES:
        if any(pattern.search(place) for place in places):
            return words
    return None
