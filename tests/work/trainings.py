"""Small trainings with one planted waste, whose line bears ``# WASTE`` and a name, or with none."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
PLANTED: dict[str, tuple[str, Callable[[], Step]]] = {}
ORDINARY: dict[str, Callable[[], Step]] = {}
_WIDTH = 128


def planted(kind: str) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    def note(make: Callable[[], Step]) -> Callable[[], Step]:
        PLANTED[make.__name__] = kind, make
        return make

    return note


def ordinary(make: Callable[[], Step]) -> Callable[[], Step]:
    ORDINARY[make.__name__] = make
    return make


class Block(nn.Module):
    def __init__(self, width: int = _WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)  # WASTE: recompute_tail


class Net(nn.Module):
    def __init__(self, out: int = 10, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(_WIDTH, out)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = (
                layer(x)
                if self.reentrant is None
                else checkpoint(layer, x, use_reentrant=self.reentrant)
            )
        return self.head(x)


def _x(rows: int = 256, *, grad: bool = False) -> torch.Tensor:
    return torch.randn(rows, _WIDTH, requires_grad=grad)


def _y(rows: int = 256) -> torch.Tensor:
    return torch.randint(0, 10, (rows,))


def _trained(*modules: nn.Module, **options: Any) -> Callable[[torch.Tensor], None]:
    weights = [p for one in modules for p in one.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-3, **options)

    def train(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


@planted("repeated")
def old_log_probabilities() -> Step:
    net = Net()
    train = _trained(net)

    def step() -> None:
        x, y = _x(), _y()
        with torch.no_grad():
            old = net(x).log_softmax(-1)  # WASTE: old_log_probabilities
        ratio = (net(x).log_softmax(-1) - old).exp().gather(1, y[:, None])
        train(-ratio.mean())

    return step


@planted("repeated")
def old_log_probabilities_of_a_reentrant_model() -> Step:
    net = Net(reentrant=True)
    train = _trained(net)

    def step() -> None:
        x, y = _x(grad=True), _y()
        with torch.no_grad():
            old = net(x).log_softmax(-1)  # WASTE: old_log_probabilities_of_a_reentrant_model
        ratio = (net(x).log_softmax(-1) - old).exp().gather(1, y[:, None])
        train(-ratio.mean())

    return step


@planted("repeated-rows")
def old_log_probabilities_in_parts() -> Step:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        x, y, order = _x(), _y(), torch.randperm(256)
        with torch.no_grad():
            old = net(x).log_softmax(-1)  # WASTE: old_log_probabilities_in_parts
        for part in order.chunk(4):
            ratio = (net(x[part]).log_softmax(-1) - old[part]).exp().gather(1, y[part][:, None])
            (-ratio.mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@planted("repeated")
def encoder_for_two_losses() -> Step:
    encoder, one, other = Net(_WIDTH), nn.Linear(_WIDTH, 10), nn.Linear(_WIDTH, 10)
    train = _trained(encoder, one, other)

    def step() -> None:
        x, y = _x(), _y()
        first = F.cross_entropy(one(encoder(x)), y)
        second = F.cross_entropy(other(encoder(x)), y)  # WASTE: encoder_for_two_losses
        train(first + second)

    return step


@planted("unread")
def head_for_nobody() -> Step:
    net = Net()
    extra = nn.Sequential(nn.Linear(_WIDTH, 1024), nn.GELU(), nn.Linear(1024, 1024))
    train = _trained(net, extra)

    def step() -> None:
        x, y = _x(), _y()
        extra(x)  # WASTE: head_for_nobody
        train(F.cross_entropy(net(x), y))

    return step


@planted("unread-gradient")
def gradients_of_the_discriminator() -> Step:
    generator, judge = Net(_WIDTH), Net(1)
    first = torch.optim.SGD(generator.parameters(), lr=1e-3)
    second = torch.optim.SGD(judge.parameters(), lr=1e-3)

    def step() -> None:
        made = generator(_x())
        second.zero_grad()
        loss = F.softplus(-judge(_x())).mean() + F.softplus(judge(made.detach())).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        first.step()

    return step


@planted("unread-recompute")
def recompute_tail() -> Step:
    net = Net(reentrant=True)
    train = _trained(net)
    return lambda: train(F.cross_entropy(net(_x(grad=True)), _y()))


class Parts(nn.Module):
    """A layer whose children are checkpointed, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.GroupNorm(8, _WIDTH), Block()

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(self.norm, x, use_reentrant=False)  # WASTE: children_checkpointed
        return checkpoint(self.block, x, use_reentrant=False)


class Layers(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@planted("between")
def children_checkpointed() -> Step:
    net = Layers(Parts)
    train = _trained(net)
    return lambda: train(F.cross_entropy(net(_x(2048)), _y(2048)))


class Kept(torch.autograd.Function):
    """Keeps its result as an attribute: a cycle that only the garbage collector breaks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.kept = x.sin()
        return ctx.kept

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.kept.cos()


@planted("after-backward")
def cycle() -> Step:
    net = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
    train = _trained(net)

    def run(layer: nn.Module, x: torch.Tensor) -> Any:
        return Kept.apply(layer(x)).sin()

    def step() -> None:
        x = _x(2048)
        for layer in net:
            x = checkpoint(run, layer, x, use_reentrant=False)  # WASTE: cycle
        train(x.square().mean())

    return step


@planted("never-read")
def logits_in_a_variable() -> Step:
    net = Net(2048)
    train = _trained(net)

    def step() -> object:
        x, y = _x(1024), torch.randint(0, 2048, (1024,))
        logits = net(x)
        doubled = logits.detach() * 2.0  # WASTE: logits_in_a_variable
        highest = doubled.max().item()
        train(F.cross_entropy(logits, y))
        return highest

    return step


@ordinary
def evaluated_in_inference_mode() -> Step:
    net, x, y = Net(), _x(), _y()
    train = _trained(net)

    def step() -> float:
        train(F.cross_entropy(net(_x()), y))
        with torch.inference_mode():
            return float((net(x).argmax(-1) == y).double().mean())

    return step


@ordinary
def plain() -> Step:
    net = Net()
    train = _trained(net)
    return lambda: train(F.cross_entropy(net(_x()), _y()))


@ordinary
def checkpointed_with_dropout() -> Step:
    net, drop, head = Net(_WIDTH, reentrant=False), nn.Dropout(0.1), nn.Linear(_WIDTH, 10)
    train = _trained(net, head)
    return lambda: train(F.cross_entropy(head(drop(net(_x()))), _y()))


@ordinary
def two_forwards_with_other_dropout() -> Step:
    net = nn.Sequential(nn.Dropout(0.2), Net())
    train = _trained(net)

    def step() -> None:
        x, y = _x(), _y()
        one, other = net(x), net(x)
        apart = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        train(F.cross_entropy(one, y) + F.cross_entropy(other, y) + apart)

    return step


@ordinary
def averaged_weights() -> Step:
    net, teacher = Net(), Net()
    train = _trained(net)

    def step() -> None:
        x, y = _x(), _y()
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        train(F.cross_entropy(net(x), y) + F.cross_entropy(net(x[:1]), soft[:1]))
        with torch.no_grad():
            for mean, one in zip(teacher.parameters(), net.parameters(), strict=True):
                mean.lerp_(one, 0.01)

    return step


@ordinary
def written_through_numpy() -> Step:
    net = Net()
    train = _trained(net)

    def step() -> None:
        x, y = _x(), _y()
        first = F.cross_entropy(net(x), y)
        x.numpy()[:] *= 2.0
        train(first + F.cross_entropy(net(x), y))

    return step


@ordinary
def written_through_an_earlier_view() -> Step:
    net, table, y = Net(), _x(), _y()
    view = table.numpy()
    train = _trained(net)

    def step() -> None:
        first = F.cross_entropy(net(table), y)
        view[:] *= 0.9
        train(first + F.cross_entropy(net(table), y))

    return step


@ordinary
def weights_changed_through_data() -> Step:
    net = Net()
    train = _trained(net)

    def step() -> None:
        x = _x()
        with torch.no_grad():
            before = net(x).log_softmax(-1)
            for p in net.parameters():
                p.data.mul_(0.99)
        train(F.kl_div(net(x).log_softmax(-1), before, log_target=True, reduction="batchmean"))

    return step


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grads[0] * (gate * (1 + x * (1 - gate)))


@ordinary
def function_that_repeats_its_forward() -> Step:
    one, other = nn.Linear(_WIDTH, 512), nn.Linear(512, 10)
    train = _trained(one, other)
    return lambda: train(F.cross_entropy(other(Swish.apply(one(_x()))), _y()))


@ordinary
def penalty_on_gradients() -> Step:
    net = Net(1)
    train = _trained(net)

    def step() -> None:
        x = _x(grad=True)
        y = net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        train(y.mean() + (slope.norm(dim=1) - 1).square().mean())

    return step


@ordinary
def batch_statistics() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    train = _trained(net, momentum=0.9)

    def step() -> None:
        images, y = torch.randn(8, 3, 48, 48), _y(8)
        with torch.no_grad():
            net(images)  # moves the running statistics
        train(F.cross_entropy(net(images), y))

    return step
