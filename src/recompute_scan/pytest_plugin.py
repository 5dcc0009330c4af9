"""Fixtures for pytest: a model's own tests keep its checkpoints cheap and right.

Loaded by pytest itself (entry point ``pytest11``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recompute_scan.record.checkpoint_calls import Probe, install_self_test
from recompute_scan.record.isolation import Guard
from recompute_scan.record.profiler import ProfilerWindow
from recompute_scan.result.run_record import RunInfo, write_run_info

Assert = Callable[..., None]
_STEPS = 2


@pytest.fixture
def assert_no_redundant_recompute(tmp_path: Path) -> Iterator[Assert]:
    """``assert_no_redundant_recompute(step, max_recompute=1.0)``: fails where work runs again
    twice.

    ``step`` is a function without arguments that trains one step: a forward pass with its
    backward. It is called three times, on whatever device the model is; its operators are recorded
    on the CPU. The test fails with the blocks, the call sites and the fix where forward work runs
    again more than ``max_recompute`` times in a backward pass (0: not at all), and where that
    cannot be determined. Make the model inside the test, so that the call sites are seen.
    """
    with CallRecorder(Path.cwd()) as recorder:

        def check(step: Callable[[], Any], *, max_recompute: float = 1.0) -> None:
            __tracebackhide__ = True
            trace = tmp_path / "recompute-scan-step.json.gz"
            recorder.record(step, trace)
            _hold_to(trace, doubled=max_recompute < 2, max_recompute=max_recompute)

        yield check


@pytest.fixture
def assert_recompute_is_faithful(tmp_path: Path) -> Iterator[Assert]:
    """``assert_recompute_is_faithful(step)``: fails where a recompute is not the computation of
    its forward.

    ``step`` is a function without arguments that trains one step: a forward pass with its
    backward. It is called four times, and the second time each checkpoint's recompute is compared
    with its forward, operator by operator, on whatever device the model is. The test fails with
    the operator, the module and the fix where gradients come out wrong or buffers are updated
    twice, and where that cannot be determined, as with compiled code. Make the model inside the
    test, so that the call sites are seen.
    """
    with CallRecorder(Path.cwd()) as recorder:

        def check(step: Callable[[], Any]) -> None:
            __tracebackhide__ = True
            recorder.record_run(step, tmp_path)
            _hold_to(tmp_path, doubled=False, wrong_gradients=True)

        yield check


def _hold_to(recorded: Path, **policy: Any) -> None:
    """Fail the test where what was recorded is refused, or cannot be determined."""
    __tracebackhide__ = True
    from recompute_scan.analysis.pipeline import analyse  # noqa: PLC0415
    from recompute_scan.check import Policy, judge  # noqa: PLC0415
    from recompute_scan.check.formats import text  # noqa: PLC0415

    outcome = judge(analyse([recorded]), Policy(**policy))
    if outcome.status:
        pytest.fail(text(outcome), pytrace=False)


class CallRecorder:
    """Annotates checkpointed calls from its beginning to its end, and records steps on request.

    Made before the model is, it sees who switched checkpointing on. On the CPU only: what runs
    again does not depend on the device.

    Args:
        folder: Call sites are shown relative to it.
    """

    def __init__(self, folder: Path) -> None:
        self._guard = Guard()
        self._probe = Probe(folder, self._guard)

    def __enter__(self) -> CallRecorder:
        install_self_test(self._probe)
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.remove()

    def record_run(self, step: Callable[[], object], folder: Path) -> None:
        """Compare a step with its recomputes, record two more, and leave a run's folder with what
        both show.
        """
        step()  # the first warms up
        self._probe.begin()
        self._probe.comparison.compare()
        try:
            step()
        finally:
            found = self._probe.comparison.compared()
        trace = folder / "trace-rank0.json.gz"
        self._record(step, trace)
        info = RunInfo(
            rank=0,
            world_size=1,
            status="complete",
            exit_status=0,
            device="cpu",
            warmup_steps=1,
            timed_steps_ms=(),
            profiled_steps=_STEPS,
            trace=trace.name,
            stacks=None,
            sources=self._probe.sites.sources(),
            fidelity=found,
        )
        write_run_info(folder, info)

    def record(self, step: Callable[[], object], trace: Path) -> None:
        """Call ``step`` three times and write a trace of the last two, gzipped Kineto JSON."""
        step()
        self._record(step, trace)

    def _record(self, step: Callable[[], object], trace: Path) -> None:
        self._probe.begin()
        window = ProfilerWindow(lead=0, steps=_STEPS, device="cpu", stacks=False)
        window.start()
        try:
            for _ in range(_STEPS):
                step()
                window.step()
        finally:
            window.stop()
        window.export(trace)
