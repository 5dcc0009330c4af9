"""Ways in which a training's recomputes change under way, and what is to be told."""

from collections.abc import Callable

import torch
from msgspec import Struct
from torch import nn

from tests.guard import nets
from tests.guard.nets import Net

_count = [0]


class Regression(Struct, frozen=True):
    """What happens to which block, and the kinds that name it."""

    name: str
    inject: Callable[[Net], None]
    module: str
    kinds: tuple[str, ...]
    reentrant: bool = False
    start: Callable[[Net], None] = lambda net: None


def _call(place: int, how: Callable[[nn.Module, torch.Tensor], object]) -> Callable[[Net], None]:
    def inject(net: Net) -> None:
        net.how[place] = how

    return inject


def _all(how: Callable[[nn.Module, torch.Tensor], object]) -> Callable[[Net], None]:
    def inject(net: Net) -> None:
        net.how[:] = [how] * len(net.how)

    return inject


def _extra(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net], None]:
    def inject(net: Net) -> None:
        block = net.blocks[1]
        assert isinstance(block, nets.Block)
        block.extra = function

    return inject


def _norm(net: Net) -> None:
    block = net.blocks[1]
    assert isinstance(block, nets.Block)
    block.norm = nn.BatchNorm1d(8)


def _counting_branch(x: torch.Tensor) -> torch.Tensor:
    """Another computation in every second run."""
    _count[0] += 1
    return x.sigmoid() if _count[0] % 2 else x.tanh()


def _shapes(x: torch.Tensor) -> torch.Tensor:
    """Another constant in every run: what a cache that grows does to a branch on its size."""
    _count[0] += 1
    return x * torch.ones(_count[0], 8).sum(0).tanh().mul(0.1).add(float(_count[0]))


def _draws_once(x: torch.Tensor) -> torch.Tensor:
    """Draws in every second run only, as what is cached does; dropout's numbers are others then."""
    _count[0] += 1
    if _count[0] % 2:
        torch.rand(1)
    return nn.functional.dropout(x, 0.2)


def _weights_move(net: Net) -> None:
    """The weights of a block are another's before its recompute, as an update in backward does."""
    block = net.blocks[1]
    assert isinstance(block, nets.Block)

    def moved(_: torch.Tensor) -> None:
        block.inner.weight.data.mul_(0.5)

    def how(block: nn.Module, x: torch.Tensor) -> object:
        y = nets.once(block, x)
        y.register_hook(moved)
        return y

    net.how[1] = how


def _logs_slopes(block: nn.Module, x: torch.Tensor) -> object:
    """A gradient is asked for beside the training, for a log: a second recompute of one forward."""
    y = nets.once(block, x)
    torch.autograd.grad(y.sum(), list(block.parameters()), retain_graph=True)
    return y


REGRESSIONS = (
    Regression("off for one layer", _call(2, nets.plainly), "blocks.2", ("off",)),
    Regression("off for all", _all(nets.plainly), "blocks.0", ("off",)),
    Regression(
        "on for one layer", _call(2, nets.once), "blocks.2", ("on",), start=_call(2, nets.plainly)
    ),
    Regression("a second switch", _call(1, nets.twice_to_the_end), "blocks.1", ("doubled",)),
    Regression("a second switch everywhere", _all(nets.twice_to_the_end), "blocks.3", ("doubled",)),
    Regression(
        "a second switch, reentrant",
        _call(1, nets.twice_reentrant),
        "blocks.1",
        ("doubled",),
        reentrant=True,
    ),
    Regression("the other variant", _all(nets.once_reentrant), "blocks.0", ("variant",)),
    Regression("random state not kept", _call(3, nets.other_random), "blocks.3", ("random-state",)),
    Regression(
        "the second switch off", _call(1, nets.once), "blocks.1", ("off",),
        start=_call(1, nets.twice_to_the_end),
    ),
    Regression("another branch", _extra(_counting_branch), "blocks.1", ("unfaithful",)),
    Regression("another size", _extra(_shapes), "blocks.1", ("unfaithful",)),
    Regression("BatchNorm put in", _norm, "blocks.1", ("unfaithful",)),
    Regression("a draw that is cached", _extra(_draws_once), "blocks.1", ("unfaithful",)),
    Regression("weights move under way", _weights_move, "blocks.1", ("unfaithful",)),
    Regression("slopes for a log", _call(2, _logs_slopes), "blocks.2", ("repeated",)),
    Regression(
        "cut off, reentrant", _call(2, nets.detached), "blocks.2", ("lost",), reentrant=True
    ),
)  # fmt: skip
