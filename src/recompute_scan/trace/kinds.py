"""What an event is, over all spellings of its category since torch 1.8."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an event is; the host's calls come first."""

    OP = 0
    ANNOTATION = 1
    RUNTIME = 2
    KERNEL = 3
    COPY = 4
    PYTHON = 5
    OTHER = 6


KINDS = {
    "cpu_op": Kind.OP,
    "Operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "Runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
    "python_function": Kind.PYTHON,
}
