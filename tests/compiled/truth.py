"""The truth about a compiled training step: its operators, counted as they run.

A dispatch mode sees each operator that a model compiled with ``aot_eager`` runs, and each that the
same model runs uncompiled and without checkpoints. What the compiled backward pass runs more than
the uncompiled one ran again.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import Step

PRODUCTS = ("mm", "addmm", "bmm")

# What no kernel belongs to, and what the compiler writes in another way than eager code does.
VIEWS = frozenset(
    "t transpose view _unsafe_view reshape expand permute slice select unsqueeze squeeze detach "
    "alias split split_with_sizes unbind getitem as_strided lift_fresh "
    # What autograd, or what calls compiled code, makes of its own accord.
    "empty_strided copy_ ones_like empty_like".split()
)


class Operators(TorchDispatchMode):
    """Counts operators by name, in the forward and in the backward pass."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backward = False
        self.modules: Counter[str] = Counter()
        self._of = {
            weight.untyped_storage().data_ptr(): name.rpartition(".")[0]
            for name, weight in model.named_parameters()
        }
        self.counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code runs as it does without the mode."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same, by its newer name."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # What keeps the random state of an operator is called with that operator.
        inside = [one for one in args if isinstance(one, torch._ops.OpOverload)]
        name = str(inside[0] if inside else function).removeprefix("aten.").partition(".")[0]
        if name not in VIEWS and not name.endswith("backward"):
            self.counts[self.backward][name] += 1
        if self.backward and name in PRODUCTS:
            storages = [
                one.untyped_storage().data_ptr()
                for one in args
                if type(one) in (Tensor, nn.Parameter)
            ]
            self.modules.update({self._of[one] for one in storages if one in self._of})
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """Operators of one step by name, views left out, and products of the backward pass by the
    module whose weights they read.
    """

    forward: Counter[str]
    backward: Counter[str]
    modules: Counter[str]


def count(step: Step, warmup: int = 2) -> Counted:
    """The operators of one step, after steps that compile.

    Args:
        step: Runs the forward pass and returns the loss.
        warmup: Steps before the one that is counted.
    """
    for _ in range(warmup):
        step.backward(step())
    mode = Operators(step.model)
    with mode:
        loss = step()
        mode.backward = True
        step.backward(loss)
    return Counted(mode.counts[False], mode.counts[True], mode.modules)


# Work that is worth a checkpoint: a recompute of anything else costs next to nothing.
HEAVY = (
    "addmm", "_scaled_dot_product_flash_attention_for_cpu", "convolution", "native_layer_norm",
    "native_dropout", "gelu", "silu",
)  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """What ran again in one step.

    Attributes:
        forward: Operators of the uncompiled forward pass.
        again: Operators that the compiled backward pass runs beyond the uncompiled one's.
        modules: Matrix products among them, by the module whose weights they read.
        weighted: Modules whose weights products read in any backward pass.
    """

    forward: Counter[str]
    again: Counter[str]
    modules: Counter[str]
    weighted: tuple[str, ...]


def measure(compiled: Step, plain: Step) -> Truth:
    """What the compiled step runs again, by the plain one."""
    first, second = count(plain), count(compiled)
    again = Counter(second.backward)
    again.subtract(first.backward)
    modules = Counter(second.modules)
    modules.subtract(first.modules)
    return Truth(first.forward, +again, +modules, tuple(modules))
