"""Nsight Systems' SQLite export (``nsys export --type sqlite``) to columns."""
