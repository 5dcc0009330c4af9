"""Traces in: files to columns. Nothing above this package knows a file format."""

from recompute_scan.trace.columns import Kind, Trace
from recompute_scan.trace.store import find, load

__all__ = ["Kind", "Trace", "find", "load"]
