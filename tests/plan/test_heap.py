"""Memory that is got anew, from a real system."""

import mmap
import sys
import time

import pytest

from recompute_scan.record.measure import Heap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it of a thread")

_BYTES = 64 << 20


def filled(anew: bool) -> Heap:
    """What is told of ten steps that write to 16,384 pages, which are new in each or are not."""
    heap = Heap()
    memory = mmap.mmap(-1, _BYTES)
    memory.write(bytes(_BYTES))
    for _ in range(10):
        heap.begin()
        began = time.thread_time()
        if anew:
            memory.close()
            memory = mmap.mmap(-1, _BYTES)
        memory.seek(0)
        for _ in range(_BYTES >> 20):
            memory.write(bytes(1 << 20))
        heap.end(0, (time.thread_time() - began) * 1e3)
    return heap


def test_pages_that_are_new_in_each_step_are_told_of() -> None:
    (said,) = filled(anew=True).remarks()
    assert "pages per step" in said
    assert "MALLOC_TRIM_THRESHOLD_" in said


def test_pages_that_stay_are_not() -> None:
    assert filled(anew=False).remarks() == ()


def test_nothing_is_said_of_no_steps() -> None:
    assert Heap().remarks() == ()
