"""Record calls of a function, as ``run`` records the steps of a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from recompute_scan.record import selftest
from recompute_scan.record.guard import Guard
from recompute_scan.record.probe import Probe
from recompute_scan.record.profiler import ProfilerWindow


class CallRecorder:
    """Marks checkpointed calls from its beginning to its end, and records steps when told.

    Made before the model is, it sees who switched checkpointing on. On the CPU only: what runs
    again does not depend on the device.

    Args:
        folder: Call sites are shown relative to it.
    """

    def __init__(self, folder: Path) -> None:
        self._guard = Guard()
        self._probe = Probe(folder, self._guard)

    def __enter__(self) -> CallRecorder:
        selftest.install(self._probe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._probe.remove()

    def record(
        self, step: Callable[[], object], trace: Path, *, warmup: int = 1, steps: int = 2
    ) -> None:
        """Call ``step`` some times and write a trace of the last ones.

        Args:
            step: One training step: a forward pass and its backward.
            trace: The file to write, gzipped Kineto JSON.
            warmup: Calls before anything is recorded.
            steps: Calls to record.
        """
        for _ in range(warmup):
            step()
        self._probe.begin()
        window = ProfilerWindow(lead=0, steps=steps, device="cpu", stacks=False)
        window.start()
        try:
            for _ in range(steps):
                step()
                window.step()
        finally:
            window.stop()
        window.export(trace)
