"""Recomputes in compiled regions, from the compiler's graphs."""
