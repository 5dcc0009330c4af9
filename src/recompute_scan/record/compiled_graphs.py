"""The compiler's graphs, taken while it compiles, from torch's structured trace.

torch writes every graph to the logger behind ``TORCH_TRACE``, from a warm cache too. Nothing is
taken once recording is over, and a timed step compiles nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from recompute_scan.compiled.logs import wanted_name, write_record
from recompute_scan.files import write_whole
from recompute_scan.record.isolation import Guard
from recompute_scan.result.run_record import compiled_name

_LOGGER = "torch.__trace"
_MISSING = "What compiled code recomputes is not known"


class CompiledGraphs(logging.Handler):
    """Takes the graphs of this process.

    Args:
        folder: Where they go.
        rank: The rank that they are of, as last known.
        guard: What is between this and the script.
    """

    def __init__(self, folder: Path, rank: Callable[[], int], guard: Guard) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank
        self._guard = guard
        self._process = os.getpid()
        self._taken: list[str] = []
        self._written = 0

    def install(self) -> None:
        """Begin to listen."""
        logging.getLogger(_LOGGER).addHandler(self)

    def remove(self) -> None:
        """Listen no more."""
        logging.getLogger(_LOGGER).removeHandler(self)

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record, if it is one that is needed; what fails here stays here."""
        with self._guard.part(_MISSING):
            if os.getpid() == self._process:
                self._take(record)
        return True

    def write(self) -> None:
        """Write what has been taken so far; the file appears whole or not at all."""
        taken = list(self._taken)
        if os.getpid() != self._process or len(taken) == self._written:
            return
        with self._guard.part(_MISSING):
            text = "".join(taken).encode("utf-8", errors="replace")
            write_whole(self._folder / compiled_name(self._rank()), text)
            self._written = len(taken)

    def _take(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "metadata", None)
        if not isinstance(fields, dict) or wanted_name(fields) is None:
            return
        payload = getattr(record, "payload", None)
        # Sizes and stacks of all that was traced are long, and needed by nobody here.
        short = {
            name: {} if isinstance(one, dict) and name != "artifact" else one
            for name, one in fields.items()
        }
        self._taken.append(write_record(short, payload if isinstance(payload, str) else ""))
