"""How a device spends its time, in traces made for it."""

import pytest
from msgspec.structs import astuple

from recompute_scan.cost.phases import device_time
from tests.present import present
from tests.recompute.training import training_step
from tests.trace_builder import launch, loaded, op, thread


def test_computing_communicating_copying_and_nothing() -> None:
    """10 ms of a product, 8 ms of communication, 6 of them beside it, 2 ms idle, 4 of a copy."""
    calls = [
        op("aten::mm", launch("ampere_sgemm", 10_000.0, at=1000.0)),
        op("c10d::allreduce_", launch("ncclDevKernel_AllReduce", 8000.0, stream=9, at=5000.0)),
        op("aten::copy_", launch("Memcpy DtoD", 4000.0, at=15_000.0, category="gpu_memcpy")),
    ]
    found = present(device_time(loaded(thread(training_step(0, *calls)))))
    assert astuple(found) == pytest.approx((18.0, 100 * 2 / 18, 100 * 10 / 18, 100 * 6 / 18, 75.0))


def test_what_is_not_there_is_not_known() -> None:
    alone = present(device_time(loaded(thread(op("aten::mm", launch("gemm", 10.0))))))
    assert alone.overlap_pct is None
    assert alone.idle_pct == 0
    assert device_time(loaded(thread(op("aten::mm")))) is None
    assert device_time(loaded(thread(op("aten::mm", launch("gemm", 0.0))))) is None
