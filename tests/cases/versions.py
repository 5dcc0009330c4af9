"""What the cases need of torch and what its versions call it, from 2.1 on."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

# What FSDP recipes put around a layer; up to 2.1 the default is the reentrant one.
non_reentrant_wrapper = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
)

# What makes a checkpoint selective; up to 2.3 it has a private name, and in 2.1 there is none.
_SELECTIVE = ("create_selective_checkpoint_contexts", "_pt2_selective_checkpoint_context_fn_gen")
_contexts: Any = next(
    (vars(torch_checkpoint)[name] for name in _SELECTIVE if name in vars(torch_checkpoint)), None
)
HAS_SELECTIVE = _contexts is not None

# FSDP asks for a stream with a priority, which 2.1 has on a GPU alone.
FSDP_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 2)

# What a policy is told, and what it answers, since 2.4: a context and a member of an enumeration.
_Policies: Any = getattr(torch_checkpoint, "CheckpointPolicy", None)


def math_attention() -> AbstractContextManager[Any]:
    """Attention by matrix products; the fused kernels have no second derivative."""
    attention = getattr(torch.nn, "attention", None)  # since 2.3
    if attention is not None:
        context: AbstractContextManager[Any] = attention.sdpa_kernel(attention.SDPBackend.MATH)
        return context
    return torch.backends.cuda.sdp_kernel(enable_flash=False, enable_mem_efficient=False)


def keeping(operators: tuple[Any, ...], kept: Callable[[str], None]) -> Callable[[], Any]:
    """A selective checkpoint's ``context_fn`` that keeps the results of those operators.

    Args:
        operators: Overloads, such as ``torch.ops.aten.mm.default``.
        kept: Told the name of an operator each time that a result of it is kept.
    """

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        keep = operator in operators
        # Up to 2.3 the first argument is a text or a dictionary that holds it.
        mode = context["mode"] if isinstance(context, dict) else context
        again = mode == "recompute" if isinstance(mode, str) else context.is_recompute
        if keep and not again:
            kept(str(operator))
        if _Policies is None:
            return keep
        return _Policies.MUST_SAVE if keep else _Policies.PREFER_RECOMPUTE

    return lambda: _contexts(policy)
