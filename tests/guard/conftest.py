"""No calls are compared in a process in which something was compiled, as other tests do."""

import sys

import pytest

from recompute_scan import _step


@pytest.fixture(autouse=True)
def nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fault in what takes the guard out leaves it in.
    monkeypatch.setattr(_step, "listeners", [])
    monkeypatch.setattr("recompute_scan.record.recording.is_recorded", lambda: False)
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()
