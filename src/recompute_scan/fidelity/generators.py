"""The random states that a region may draw from, told from each other by a number each."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from isal import isal_zlib

from recompute_scan.fidelity.fingerprint import unseen

OWN = "a generator of the script's own"


def generator_of(operator_kwargs: dict[str, Any], device: torch.device | None) -> tuple[Any, str]:
    """The generator that an operator on this device draws from, and what to call it.

    ``None`` instead of a generator where it cannot be asked.
    """
    own = operator_kwargs.get("generator")
    if own is not None:
        return own, OWN
    if device is None or device.type == "cpu":
        return torch.default_generator, "torch (cpu)"
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index], "torch (cuda)"
    return None, f"torch ({device.type})"


def state_of(generator: Any) -> int | None:
    """A number that differs where the generator's state does."""
    if generator is None:
        return None
    return int(isal_zlib.crc32(unseen(generator.get_state).numpy()))


def python_states() -> dict[str, int]:
    """The same for ``random`` and, where the script uses it, ``numpy.random``."""
    found = {"random": hash(random.getstate())}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, place, *_ = numpy.get_state(legacy=True)
        found["numpy.random"] = hash((name, keys.tobytes(), place))
    return found
