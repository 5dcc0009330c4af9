"""Keeps Kineto's own log lines off the user's terminal.

torch 2.13's Kineto writes ``USDT:…`` lines to file descriptor 2 whenever a profiler starts or
stops; no setting turns them off. The descriptor is redirected only while our own calls into
the profiler last, and everything else that was written meanwhile is passed on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_NOISE = b"USDT:"


@contextmanager
def without_kineto_noise() -> Iterator[None]:
    """Run the body with Kineto's log lines left out of standard error."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
        terminal = os.dup(2)
    except (OSError, ValueError):  # no usable standard error: nothing to protect
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            caught.seek(0)
            kept = b"".join(line for line in caught if not line.startswith(_NOISE))
            while kept:
                kept = kept[os.write(terminal, kept) :]
            os.close(terminal)
