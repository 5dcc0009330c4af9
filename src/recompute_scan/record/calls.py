"""Record calls of a function, as ``run`` records the steps of a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from recompute_scan.faithful import Fidelity
from recompute_scan.record import selftest
from recompute_scan.record.guard import Guard
from recompute_scan.record.probe import Probe
from recompute_scan.record.profiler import ProfilerWindow
from recompute_scan.run_info import RunInfo, write_run_info


class CallRecorder:
    """Annotates checkpointed calls from its beginning to its end, and records steps when told.

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

    def compare(self, step: Callable[[], object], *, warmup: int = 1) -> Fidelity:
        """How the recomputes of a step compare with their forward.

        Args:
            step: One training step: a forward pass and its backward.
            warmup: Calls before the one that is compared.
        """
        for _ in range(warmup):
            step()
        self._probe.begin()
        self._probe.comparison.compare()
        try:
            step()
        finally:
            found = self._probe.comparison.compared()
        return found

    def record_run(self, step: Callable[[], object], folder: Path) -> None:
        """Compare a step, record two more, and leave a run's folder with what both show.

        Args:
            step: One training step: a forward pass and its backward.
            folder: Where the trace and the run record go.
        """
        found = self.compare(step)
        trace = folder / "trace-rank0.json.gz"
        self.record(step, trace, warmup=0)
        info = RunInfo(
            rank=0,
            world_size=1,
            status="complete",
            exit_status=0,
            device="cpu",
            warmup_steps=1,
            timed_steps_ms=(),
            profiled_steps=2,
            trace=trace.name,
            stacks=None,
            sources=self._probe.sites.sources(),
            fidelity=found,
        )
        write_run_info(folder, info)

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
