"""Autograd functions of the user's making that look like checkpoints, whatever they are called.

A checkpoint's backward turns gradients on, runs something again and starts a backward pass of its
own. That shows in what the code of its ``backward`` names; whether it does run anything again is
for the trace to tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

_TURNS_ON = frozenset({"enable_grad", "set_grad_enabled"})
_STARTS = frozenset({"backward", "grad"})
_DEEPEST = 2


def own_functions() -> Iterator[Any]:
    """The classes in this process that define a forward, but those of torch."""
    for function in _below(torch.autograd.Function):
        home = str(getattr(function, "__module__", "")).partition(".")[0]
        own = home != "torch" and "forward" in vars(function)
        if own and recomputes(getattr(function, "backward", None)):
            yield function


def recomputes(backward: Any) -> bool:
    """Does the code of a ``backward`` turn gradients on and start a backward pass?"""
    # torch.amp.custom_bwd and once_differentiable are around many.
    names = set(_names(inspect.unwrap(backward), _DEEPEST)) if callable(backward) else set()
    return bool(names & _TURNS_ON) and bool(names & _STARTS)


def _below(kind: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(kind)
    for child in children:
        yield child
        yield from _below(child)


def _names(function: object, depth: int) -> Iterator[str]:
    """What a function's code refers to, and what the functions beside it do that it calls."""
    if not isinstance(function, FunctionType):
        return
    for name in _named_in(function.__code__):
        yield name
        beside = function.__globals__.get(name)
        if depth and getattr(beside, "__module__", None) == function.__module__:
            yield from _names(beside, depth - 1)


def _named_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named_in(constant)
