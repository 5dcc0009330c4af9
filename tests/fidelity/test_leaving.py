"""What leaves a reentrant checkpoint without its gradient is found, and nothing else is.

The truth is a plain run's: gradients with the checkpoints beside those without.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

from tests.fidelity.cases import Case, D
from tests.fidelity.compare import check, compare, gradients, wrong
from tests.fidelity.truth import build, measure, step

pytestmark = pytest.mark.filterwarnings("ignore")
Shape = Callable[[torch.Tensor, torch.Tensor], Any]


class Pair(NamedTuple):
    hidden: Any
    extra: Any


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor


@dataclass
class Modern(ModelOutput):
    hidden: torch.Tensor | None = None
    extra: torch.Tensor | None = None


class Slotted:
    __slots__ = ("extra", "hidden")

    def __init__(self, hidden: torch.Tensor, extra: torch.Tensor) -> None:
        self.hidden, self.extra = hidden, extra

    @property
    def never(self) -> None:
        raise AssertionError("a property was called")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"__getattr__ was called for {name}")


class Plain:
    def __init__(self, hidden: torch.Tensor, extra: torch.Tensor) -> None:
        self.hidden, self.extra = hidden, extra


class Block(nn.Module):
    """Gives two results in some form; what is kept in an attribute too."""

    def __init__(self, form: Shape) -> None:
        super().__init__()
        self.one, self.two, self.form = nn.Linear(D, D), nn.Linear(D, D), form
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        hidden, extra = self.one(x).tanh(), self.two(x).tanh()
        self.aux = extra
        return self.form(hidden, extra)


class Model(nn.Module):
    """Blocks behind a reentrant checkpoint, and a loss on what ``take`` takes of their results."""

    def __init__(
        self, on: bool, form: Shape, take: Callable[[Any, Block], Any], grad: bool
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, 1)
        self.blocks = nn.ModuleList(Block(form) for _ in range(2))
        self.on, self.take, self.grad = on, take, grad

    def forward(self, x: torch.Tensor) -> Any:
        hidden, loss = (self.embed(x) if self.grad else x), 0.0
        for block in self.blocks:
            result = checkpoint(block, hidden, use_reentrant=True) if self.on else block(hidden)
            hidden, more = self.take(result, cast("Block", block))
            loss = loss + more
        return self.head(hidden).square().mean() + loss


def _of(form: Shape, take: Callable[[Any, Any], Any], *, grad: bool = True) -> Any:
    return lambda on: Model(on, form, take, grad)


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean()


NESTED = {
    "a tuple in a tuple": (lambda h, e: (h, (e,)), lambda r, _: (r[0], _mean(r[1][0])), "[1][0]"),
    "a list": (lambda h, e: (h, [e]), lambda r, _: (r[0], _mean(r[1][0])), "[1][0]"),
    "a dictionary": (
        lambda h, e: (h, {"aux": e}),
        lambda r, _: (r[0], _mean(r[1]["aux"])),
        "[1]['aux']",
    ),
    "a named tuple in a tuple": (
        lambda h, e: (h, Pair(e, {"deep": [e]})),
        lambda r, _: (r[0], _mean(r[1].extra["deep"][0])),
        "[1].hidden",
    ),
    "a dataclass": (Output, lambda r, _: (r.hidden, _mean(r.extra)), ".extra"),
    "a model output": (Modern, lambda r, _: (r.hidden, _mean(r.extra)), "['extra']"),
    "an object with slots": (Slotted, lambda r, _: (r.hidden, _mean(r.extra)), ".extra"),
    "an object": (Plain, lambda r, _: (r.hidden, _mean(r.extra)), ".extra"),
    "an attribute of the module": (
        lambda h, e: h,
        lambda r, block: (r, _mean(block.aux)),
        "",
    ),
}
RIGHT = {
    "side by side": _of(lambda h, e: (h, e), lambda r, _: (r[0], _mean(r[1]))),
    "nested and not used": _of(lambda h, e: (h, (e,)), lambda r, _: (r[0], 0.0)),
    "nested, and detached inside": _of(
        lambda h, e: (h, (e.detach(),)), lambda r, _: (r[0], _mean(r[1][0]))
    ),
    "nested, and detached outside": _of(
        lambda h, e: (h, (e,)), lambda r, _: (r[0], _mean(r[1][0].detach()))
    ),
    "nested, for a log": _of(
        lambda h, e: (h, (e,)), lambda r, _: (r[0], float(_mean(r[1][0])) * 0.0)
    ),
}


def _quietly(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def quiet(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return function(x)

    return quiet


class _Held(nn.Module):
    """A function that holds its weights in some way, of an input that needs no gradient."""

    def __init__(self, on: bool, hold: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.head, self.on, self.hold = nn.Linear(D, 1), on, hold

    def forward(self, x: torch.Tensor) -> Any:
        function = self.hold(list(self.layers))
        y = checkpoint(function, x, use_reentrant=True) if self.on else function(x)
        return self.head(y[0] if isinstance(y, tuple) else y).square().mean()


def _run(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x).tanh()
    return x


class _Holder:
    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = {"all": layers}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _run(self.layers["all"], x)


HELD: dict[str, Callable[[list[nn.Module]], Any]] = {
    "a list in a closure": lambda layers: lambda x: _run(layers, x),
    "a partial": lambda layers: functools.partial(_run, layers),
    "a partial of weights": lambda layers: functools.partial(
        lambda weights, x: (x @ weights[0] @ weights[1]).tanh(), [one.weight for one in layers]
    ),
    "an object that can be called": _Holder,
    "a slice in a closure": lambda some: lambda x: (_run(some[0:2], x), x),
    "a default argument": lambda layers: lambda x, some=layers: _run(some, x),
}


def _case(name: str, is_wrong: bool, make: Any) -> Case:
    return Case(name, is_wrong, make)


LOST = [_case(name, True, _of(form, take)) for name, (form, take, _) in NESTED.items()]
UNTRAINED = [
    _case(f"weights in {name}", True, lambda on, hold=hold: _Held(on, hold))
    for name, hold in HELD.items()
]
FINE = [
    *(_case(name, False, make) for name, make in RIGHT.items()),
    _case(
        "weights that autograd is not to see",
        False,
        lambda on: _Held(on, lambda layers: _quietly(lambda x: _run(layers, x))),
    ),
]


@pytest.mark.parametrize("case", [*LOST, *UNTRAINED, *FINE], ids=lambda case: case.name)
def test_what_is_said_is_what_the_gradients_say(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", NESTED)
def test_it_is_named_by_where_it_was(name: str) -> None:
    form, take, path = NESTED[name]
    found, model, _ = compare(Case(name, True, _of(form, take)))
    lost = [one for region in found.regions for one in region.lost]
    assert {one.why for one in lost} == {"left-without"}
    # Of an object everything is lost, and of a module's attribute nobody knows where it was.
    assert (path and f"output{path}") in {one.name for one in lost}
    missing = {key for key, one in gradients(model).items() if one is None}
    named = {weight for one in lost for weight in one.weights}
    assert named <= missing


def test_weights_are_named() -> None:
    found, model, _ = compare(UNTRAINED[0])
    missing = {name for name, one in gradients(model).items() if one is None}
    assert len(missing) == 6
    assert set(found.untrained) == missing


def test_recycling_without_gradients_first_is_no_loss() -> None:
    class Recycling(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)
            self.on = on

        def forward(self, x: torch.Tensor) -> Any:
            hidden: Any = 0.0
            for last in (False, False, True):
                with torch.set_grad_enabled(last):
                    given = self.embed(x) + hidden
                    run = functools.partial(checkpoint, self.block, use_reentrant=True)
                    hidden = (run if self.on else self.block)(given).tanh()
            return self.head(hidden).square().mean()

    case = Case("recycling", False, Recycling)
    assert not measure(case).wrong
    found, _, untrained = compare(case)
    assert wrong(found, untrained) == []


def test_modes_of_the_script_come_and_go_as_they_did() -> None:
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    counted = []

    class Counting(Model):
        def forward(self, x: torch.Tensor) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = super().forward(x)
            counted.append(counter.get_total_flops())
            return result

    form, take, _ = NESTED["a list"]
    case = Case("counting", True, lambda on: Counting(on, form, take, True))
    model, x = build(case, on=True)
    step(case, model, x)
    found, _, untrained = compare(case)
    assert counted[0] == counted[1] > 0
    assert wrong(found, untrained)
