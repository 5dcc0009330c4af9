"""Fixtures for pytest, so that a model's own tests keep its checkpoints cheap and right.

Loaded by pytest itself (entry point ``pytest11``). Nothing but pytest is imported until a test
asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Assert = Callable[..., None]


@pytest.fixture
def assert_no_redundant_recompute(tmp_path: Path) -> Iterator[Assert]:
    """``assert_no_redundant_recompute(step, max_recompute=1.0)``: fails where work runs again
    twice.

    ``step`` is a function without arguments that trains one step: a forward pass with its
    backward. It is called three times, on whatever device the model is; its operators are recorded
    on the CPU. The test fails with the blocks, the call sites and the fix where forward work runs
    again more than ``max_recompute`` times in a backward pass (0: not at all), and where that
    cannot be told. Make the model inside the test, so that the call sites are seen.
    """
    from recompute_scan.record.calls import CallRecorder  # noqa: PLC0415 - it imports torch

    with CallRecorder(Path.cwd()) as recorder:

        def check(step: Callable[[], Any], *, max_recompute: float = 1.0) -> None:
            __tracebackhide__ = True
            from recompute_scan.analysis.pipeline import analyse  # noqa: PLC0415
            from recompute_scan.check import Policy, judge  # noqa: PLC0415
            from recompute_scan.check.render import text  # noqa: PLC0415

            trace = tmp_path / "recompute-scan-step.json.gz"
            recorder.record(step, trace)
            policy = Policy(doubled=max_recompute < 2, max_recompute=max_recompute)
            outcome = judge(analyse([trace]), policy)
            if outcome.status:
                pytest.fail(text(outcome), pytrace=False)

        yield check


@pytest.fixture
def assert_recompute_is_faithful(tmp_path: Path) -> Iterator[Assert]:
    """``assert_recompute_is_faithful(step)``: fails where a recompute is not the computation of
    its forward.

    ``step`` is a function without arguments that trains one step: a forward pass with its
    backward. It is called four times, and the second time each checkpoint's recompute is compared
    with its forward, operator by operator, on whatever device the model is. The test fails with
    the operator, the module and the fix where gradients come out wrong or buffers are updated
    twice, and where that cannot be told, as with compiled code. Make the model inside the test,
    so that the call sites are seen.
    """
    from recompute_scan.record.calls import CallRecorder  # noqa: PLC0415 - it imports torch

    with CallRecorder(Path.cwd()) as recorder:

        def check(step: Callable[[], Any]) -> None:
            __tracebackhide__ = True
            from recompute_scan.analysis.pipeline import analyse  # noqa: PLC0415
            from recompute_scan.check import Policy, judge  # noqa: PLC0415
            from recompute_scan.check.render import text  # noqa: PLC0415

            recorder.record_run(step, tmp_path)
            policy = Policy(doubled=False, wrong_gradients=True)
            outcome = judge(analyse([tmp_path]), policy)
            if outcome.status:
                pytest.fail(text(outcome), pytrace=False)

        yield check
