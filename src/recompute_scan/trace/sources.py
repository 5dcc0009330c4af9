"""Where traces come from: files and folders here, addresses elsewhere, Nsight's databases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from recompute_scan.errors import InputError
from recompute_scan.files import is_file, opened
from recompute_scan.trace import formats, remote, store
from recompute_scan.trace.columns import Trace
from recompute_scan.trace.limits import DEFAULT_LIMITS, Limits
from recompute_scan.trace.nsys import REPORT_SUFFIXES, is_sqlite, refuse_report
from recompute_scan.trace.outline import Outline

# A path, or a remote address (`s3://…`): a path would lose one of its slashes.
Address = Path | str

_HEAD = 16
# A file of this machine all the same.
_HERE = re.compile(r"(?:file|local)://", re.IGNORECASE)


def find(addresses: Sequence[Address], limits: Limits = DEFAULT_LIMITS) -> list[Address]:
    """The traces that the given files, folders, globs, archives and addresses stand for.

    Raises:
        InputError: See :func:`recompute_scan.trace.store.find` and
            :func:`recompute_scan.trace.remote.list_remote`.
    """
    found: list[Address] = []
    for address in addresses:
        if isinstance(address, str) and (here := _HERE.match(address)):
            found.extend(store.find([Path(address[here.end() :])], limits))
        elif isinstance(address, str) and remote.is_remote(address):
            found.extend(remote.list_remote(address, limits))
        else:
            found.extend(store.find([Path(address)], limits))
    return found


def load(
    address: Address,
    *,
    python: bool = False,
    within: tuple[int, int] | None = None,
    outline: Outline | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Trace:
    """The trace at one address; what it is is told by its first bytes.

    Args:
        address: A file, a member of an archive, or a remote address.
        python: Whether ``python_function`` events are kept.
        within: Only what overlaps this span of time is kept, ns on the trace's clock; all of
            a database, or of what lies elsewhere.
        outline: The file's own, from an earlier reading; with ``within``, later parts of the file
            are passed over.
        limits: What is refused.

    Raises:
        InputError: See :func:`recompute_scan.trace.store.load`,
            :func:`recompute_scan.trace.nsys.export.load_nsys` and
            :func:`recompute_scan.trace.remote.open_remote`.
    """
    if isinstance(address, str) and remote.is_remote(address):
        return _load_remote(address, python, limits)
    path = Path(address)
    if path.suffix in REPORT_SUFFIXES:
        raise refuse_report(path)
    if is_file(path):
        with opened(path) as file:
            head = file.read(_HEAD)
        if is_sqlite(head):
            from recompute_scan.trace.nsys.export import load_nsys  # noqa: PLC0415 - most are JSON

            return load_nsys(path, limits)
    return store.load(path, python=python, within=within, outline=outline, limits=limits)


def name_of(address: Address) -> str:
    """The trace's own name, without folders, and without secrets of a remote address."""
    return remote.shown(str(address)).rstrip("/").rpartition("/")[2] or str(address)


def _load_remote(address: str, python: bool, limits: Limits) -> Trace:
    name = remote.shown(address)
    with remote.open_remote(address) as stream:
        if is_sqlite(stream.peek(_HEAD)[:_HEAD]):
            raise InputError(
                "E324",
                f"{name} is a database, which cannot be read from afar.",
                hint="copy it here first",
            )
        return formats.read(stream, name, python=python, limits=limits, health={})
