"""Recordings of ROCm's profiler."""
