"""A Dask cluster of this machine, as a person would start one."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def local_cluster() -> Iterator[str]:
    """The address of its scheduler; it has two workers of one thread each.

    Any free port serves its pages: several of these may run at once.
    """
    from distributed import LocalCluster  # noqa: PLC0415 - slow to import

    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1"
    ) as started:
        yield started.scheduler_address
