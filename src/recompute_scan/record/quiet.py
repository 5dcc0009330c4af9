"""What a recording says and keeps quiet on the user's terminal.

Some versions' Kineto writes lines to file descriptor 2 whenever a profiler starts or stops; no
setting turns them off. The descriptor is redirected only while our own calls into
the profiler last, and everything else that was written meanwhile is passed on.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from recompute_scan.record.compat import KINETO_LINE
from recompute_scan.terminal import fresh_line, without_lines

_GRAD = re.compile(r"The \.grad attribute of a Tensor")
# The modules whose lines warn in calls of ours.
_OURS = re.compile(r"torch(\.|$)|recompute_scan(\.|$)|contextlib$")


@contextmanager
def without_kineto_noise() -> Iterator[None]:
    """Run the body with Kineto's log lines left out of standard error."""
    with without_lines(2, KINETO_LINE):
        yield


@contextmanager
def without_grad_warnings() -> Iterator[None]:
    """Run the body without torch's warning on ``.grad`` of tensors that are no leaves.

    To record stacks, torch reads ``.grad`` of every tensor that a module holds, FSDP's views among
    them.
    """
    with _ignoring(_GRAD, None):
        yield


@contextmanager
def without_own_warnings() -> Iterator[None]:
    """Run the body, calls of ours into torch, without what torch warns of in them: a script may
    make errors of warnings, and would print the others.
    """
    with _ignoring(None, _OURS):
        yield


@contextmanager
def _ignoring(message: re.Pattern[str] | None, module: re.Pattern[str] | None) -> Iterator[None]:
    """The filter goes straight into the list, since all that :mod:`warnings` has for it makes
    Python show every other warning once more.
    """
    filters: Any = warnings.filters
    entry = ("ignore", message, Warning, module, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # the script has reset its filters
            filters.remove(entry)


@contextmanager
def without_modes() -> Iterator[None]:
    """Run the body with no mode of the script's on, which would see the profiler's operators."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Progress:
    """Says each phase once."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._on = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._said = ""

    def show(self, text: str) -> None:
        """Say it, unless it was what was said last."""
        if self._on and text != self._said:
            line = f"{fresh_line(sys.stderr)}recompute-scan: {text}"
            print(line, file=sys.stderr, flush=True)
            self._said = text

    def end(self) -> None:
        """Say nothing from here on: another rank does."""
        self._on = False
