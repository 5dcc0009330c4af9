"""What an autograd function of the script's makes of the gradients that its recompute gives.

Where such a function returns what the block that it runs returns, whole or in parts, the gradient
that it is given has to arrive at what the recompute returns, what that gives for the block's inputs
has to be what the function returns, and the weights have to get theirs. Sums of elements tell,
whatever the shapes and the number of parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from recompute_scan.fidelity.backward_reads import AS_IT_IS, Around
from recompute_scan.fidelity.operators import tensors
from recompute_scan.fidelity.tensors import unseen
from recompute_scan.result.fidelity import WhyLost

# How far apart sums of the same elements may be, as a share of the sum of their sizes: they may be
# rounded to bfloat16 on their way.
_ROUNDING = 0.01
_ACCUMULATES = "torch::autograd::AccumulateGrad"


class Application(Struct, eq=False):
    """One call of an autograd function, while its forward runs.

    Attributes:
        node: Its context, which is its node in the graph.
        args: What it is called with.
        returned: Who wants to know what it returns.
    """

    node: Any
    args: tuple[object, ...]
    returned: list[Callable[[Any], None]] = field(default_factory=list)

    def ended(self, result: Any) -> Any:
        """Its forward has returned this, which is returned."""
        for tell in self.returned:
            tell(result)
        return result


class _Sums(Struct):
    """Of floating-point elements: how many there are, their sum, and that of their sizes."""

    count: int = 0
    total: float = 0.0
    size: float = 0.0

    def add(self, value: object) -> None:
        for one in tensors((value,)):
            if one.is_floating_point() and not isinstance(one, nn.Parameter):
                self.count += one.numel()
                wide = one.detach().double()
                self.total += float(wide.sum())
                self.size += float(wide.abs().sum())

    def same(self, other: _Sums) -> bool:
        most = _ROUNDING * max(self.size, other.size)
        return (
            self.count == other.count
            and abs(self.total - other.total) <= most
            and abs(self.size - other.size) <= most
        )


class Passing:
    """Follows the gradients of one application."""

    def __init__(
        self, application: Application, around: Around, tell: Callable[[WhyLost], None]
    ) -> None:
        self._around = around
        self._tell = tell
        self._given, self._returned = _Sums(), _Sums()
        self._block_given, self._block_returned = _Sums(), _Sums()
        # By the number of the backward pass through what was recomputed.
        self._arrived: list[_Sums] = []
        self._left: list[_Sums] = []
        self._weights: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._got: set[int] = set()
        self._passed = False
        unseen(self._given.add, application.args)
        inputs = [one for one in tensors(application.args) if not isinstance(one, nn.Parameter)]
        self._asked = any(one.requires_grad for one in inputs)
        application.returned.append(lambda result: unseen(self._returned.add, result))
        ours = around(lambda *_: None, self._ended, named=False)
        application.node.register_hook(ours)

    def ran(self, given: object, result: object) -> None:
        """The block has run in the forward."""
        unseen(self._block_given.add, given)
        unseen(self._block_returned.add, result)

    def recomputed(self, given: object, first_node: int, result: object) -> None:
        """The block has run again; ``first_node`` is the number of its first node in the graph."""
        outputs = [one for one in tensors((result,)) if one.grad_fn is not None]
        self._watch(self._arrived, outputs)
        if outputs:
            inputs = [one for one in tensors((given,)) if one.requires_grad]
            self._watch(self._left, [one for one in inputs if not isinstance(one, nn.Parameter)])
            self._expect(outputs, first_node, {id(one) for one in inputs})

    def _watch(self, passes: list[_Sums], some: Sequence[torch.Tensor]) -> None:
        for one in some:
            one.register_hook(self._summing(passes))  # type: ignore[no-untyped-call]

    def _summing(self, passes: list[_Sums]) -> Callable[..., Any]:
        met = 0

        def see(call: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> Any:
            nonlocal met
            if met == len(passes):
                passes.append(_Sums())
            unseen(passes[met].add, gradient)
            met += 1
            return call(gradient)

        return self._around(AS_IT_IS, see, named=False)

    def _expect(self, outputs: Sequence[torch.Tensor], first_node: int, inputs: set[int]) -> None:
        """The weights in the recomputed graph are to get a gradient."""
        waiting: list[Any] = [one.grad_fn for one in outputs]
        met = set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in met:
                continue
            met.add(node)
            if node.name() == _ACCUMULATES:
                weight = node.variable
                if id(weight) not in inputs and id(weight) not in self._weights:
                    self._weights[id(weight)] = (weakref.ref(weight), self._noting(weight))
            elif node._sequence_nr() >= first_node:
                waiting += [following for following, _ in node.next_functions]

    def _noting(self, weight: torch.Tensor) -> Any:
        number = id(weight)

        def see(call: Callable[[torch.Tensor], Any], one: torch.Tensor) -> Any:
            self._got.add(number)
            return call(one)

        hook = self._around(lambda _: None, see, named=False)
        return weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _ended(self, call: Any, given: Sequence[Any], arrived: Sequence[Any]) -> Any:
        """The function's backward has run: it has ``given`` these for those that ``arrived``."""
        found = unseen(self._compared, given, arrived)
        if found is not None:
            self._tell(found)
        return call()

    def _compared(self, given: Sequence[Any], arrived: Sequence[Any]) -> WhyLost | None:
        plain = self._block_returned.same(self._returned) and self._block_returned.size > 0
        if not (plain and self._arrived):
            return None
        wanted, made = _Sums(), _Sums()
        wanted.add(arrived)
        self._passed = wanted.size > 0
        if wanted.count != self._returned.count:  # some of it is not differentiated
            return None
        if not any(one.same(wanted) for one in self._arrived):
            return "arrives-otherwise"
        made.add(given)
        if not (self._asked and self._left and self._block_given.same(self._given)):
            return None
        return None if any(one.same(made) for one in self._left) else "returned-otherwise"

    def without_gradient(self) -> list[int]:
        """Behind the outermost backward pass: the numbers of weights that got no gradient."""
        lacking = []
        for number, (weight, hook) in self._weights.items():
            hook.remove()
            one = weight()
            if self._passed and one is not None and one.grad is None and number not in self._got:
                lacking.append(number)
        self._weights.clear()
        return lacking
