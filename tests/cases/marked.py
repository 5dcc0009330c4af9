"""Cases recorded as ``recompute-scan run`` records: every checkpointed call bears an annotation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recompute_scan.record.checkpoint_calls import Probe


@contextmanager
def annotating() -> Iterator[Probe]:
    """Checkpointed calls of what is built and trained in the body are marked in its traces."""
    probe = Probe(Path.cwd())
    probe.install()
    probe.begin()
    try:
        yield probe
    finally:
        probe.remove()
