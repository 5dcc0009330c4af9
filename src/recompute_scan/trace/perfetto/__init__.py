"""Perfetto's protobuf traces (``export_chrome_trace("x.pftrace")``) to columns."""
