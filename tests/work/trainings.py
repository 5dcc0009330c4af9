"""Small trainings with one planted waste, whose line bears ``# WASTE`` and a name, or with none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Step = Callable[[], object]
WIDTH, CLASSES = 128, 10
#: What a planted training does within its waste; the oracle counts its operators.
Marked = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Planted:
    """A training with a waste: its kind, its line's mark, and how it is made.

    Attributes:
        make: Gets the layers, whether it is repaired, and what marks the waste.
        bytes: What is kept for nothing, by arithmetic; gets the layers.
        counted: Whether the marked operators are all of the waste.
    """

    kind: str
    make: Callable[[int, bool, Marked], Step]
    layers: tuple[int, ...]
    bytes: Callable[[int], int] | None = None
    counted: bool = True


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)  # WASTE: recompute_tail


class Net(nn.Module):
    """Layers and a head."""

    def __init__(self, layers: int, out: int = CLASSES, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, out)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            plain = self.reentrant is None
            x = layer(x) if plain else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def rows(many: int = 256, *, grad: bool = False) -> Tensor:
    return torch.randn(many, WIDTH, requires_grad=grad)


def labels(many: int = 256, classes: int = CLASSES) -> Tensor:
    return torch.randint(0, classes, (many,))


def trained(
    *modules: nn.Module, kind: Any = torch.optim.SGD, **options: Any
) -> Callable[[Tensor], None]:
    weights = [p for one in modules for p in one.parameters() if p.requires_grad]
    optimizer = kind(weights, lr=1e-3, **options)

    def train(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


# Work


def old_log_probabilities(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers)
    train = trained(net)

    def step() -> None:
        x, y = rows(), labels()
        old = None
        if not repaired:
            with torch.no_grad():
                old = marked(lambda: net(x).log_softmax(-1))  # WASTE: old_log_probabilities
        new = net(x).log_softmax(-1)
        old = new.detach() if old is None else old
        train(-(new - old).exp().gather(1, y[:, None]).mean())

    return step


def old_log_probabilities_of_a_reentrant_model(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers, reentrant=True)
    train = trained(net)

    def step() -> None:
        x, y, old = rows(grad=True), labels(), None
        if not repaired:
            with torch.no_grad():
                old = net(x).log_softmax(-1)  # WASTE: old_log_probabilities_of_a_reentrant_model
        new = net(x).log_softmax(-1)
        old = new.detach() if old is None else old
        train(-(new - old).exp().gather(1, y[:, None]).mean())

    return step


def encoder_twice(layers: int, repaired: bool, marked: Marked) -> Step:
    net, one, other = Net(layers, WIDTH), nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)
    train = trained(net, one, other)

    def step() -> None:
        x, y = rows(), labels()
        found = net(x)
        again = found if repaired else marked(lambda: net(x))  # WASTE: encoder_twice
        train(F.cross_entropy(one(found), y) + F.cross_entropy(other(again), y))

    return step


def teacher_twice(layers: int, repaired: bool, marked: Marked) -> Step:
    teacher, net = Net(layers), Net(2)
    train = trained(net)

    def step() -> None:
        x = rows()
        with torch.no_grad():
            soft = teacher(x)
            again = soft if repaired else marked(lambda: teacher(x))  # WASTE: teacher_twice
        out = net(x)
        train(F.mse_loss(out, soft) + F.l1_loss(out, again))

    return step


def head_for_nobody(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers)
    extra = nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 1024))
    train = trained(net, extra)

    def step() -> None:
        x, y = rows(), labels()
        if not repaired:
            marked(lambda: extra(x))  # WASTE: head_for_nobody
        train(F.cross_entropy(net(x), y))

    return step


def dropped_metric(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers, 512)
    train = trained(net)

    def step() -> None:
        x, y = rows(), labels(classes=512)
        out = net(x)
        if not repaired:
            marked(lambda: out.detach().sort(-1))  # WASTE: dropped_metric
        train(F.cross_entropy(out, y))

    return step


def encoder_for_each_loss(layers: int, repaired: bool, marked: Marked) -> Step:
    encoder, one, other = Net(layers, WIDTH), nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10)
    train = trained(encoder, one, other)

    def first(x: Tensor, y: Tensor, z: Tensor | None) -> Any:
        return F.cross_entropy(one(encoder(x) if z is None else z), y)

    def second(x: Tensor, y: Tensor, z: Tensor | None) -> Any:
        again = marked(lambda: encoder(x)) if z is None else z  # WASTE: encoder_for_each_loss
        return F.cross_entropy(other(again), y)

    def step() -> None:
        x, y = rows(), labels()
        z = encoder(x) if repaired else None
        train(first(x, y, z) + second(x, y, z))

    return step


def metric_of_a_function(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers)
    train = trained(net)

    @torch.no_grad()
    def nearest(z: Tensor) -> Tensor:
        apart = (z[:, None] - z[None]).square().sum(-1)
        apart.fill_diagonal_(float("inf"))
        return apart.topk(5, largest=False).values.mean()

    def step() -> None:
        out = net(rows())
        if not repaired:
            marked(lambda: nearest(out.detach()))  # WASTE: metric_of_a_function
        train(F.cross_entropy(out, labels()))

    return step


def table_in_each_layer(layers: int, repaired: bool, marked: Marked) -> Step:
    net = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
    places, often = torch.arange(1024.0)[:, None], torch.rand(WIDTH)
    train = trained(net)

    def table() -> Tensor:
        return (places * often).sin()  # WASTE: table_in_each_layer

    def step() -> None:
        x, first = rows(1024), None
        for layer in net:
            if first is None:
                now = first = table()
            else:
                now = first if repaired else marked(table)  # WASTE: table_in_each_layer
            x = layer(x) * now
        train(x.square().mean())

    return step


def gradients_for_nobody(layers: int, repaired: bool, marked: Marked) -> Step:
    generator, judge = Net(layers, WIDTH), Net(layers, 1)
    first, second = (torch.optim.SGD(one.parameters(), lr=1e-3) for one in (generator, judge))

    def step() -> None:
        made = generator(rows())
        second.zero_grad()
        (F.softplus(-judge(rows())).mean() + F.softplus(judge(made.detach())).mean()).backward()
        second.step()
        first.zero_grad()
        judge.requires_grad_(not repaired)
        F.softplus(-judge(made)).mean().backward()  # WASTE: gradients_for_nobody
        judge.requires_grad_(True)
        first.step()

    return step


def gradients_of_convolutions(layers: int, repaired: bool, marked: Marked) -> Step:
    draw, judge = nn.Conv2d(3, 8, 3, 1, 1), nn.Sequential()
    for _ in range(layers):
        judge.extend([nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()])
    judge.requires_grad_(not repaired)
    train = trained(draw)

    def step() -> None:
        judge.zero_grad()
        pictures = draw(torch.randn(8, 3, 32, 32))
        train(judge(pictures).square().mean())  # WASTE: gradients_of_convolutions

    return step


def recompute_tail(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers, reentrant=not repaired)
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows(grad=True)), labels()))


def rows_in_parts(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        x, y, order = rows(), labels(), torch.randperm(256)
        old = None
        if not repaired:
            with torch.no_grad():
                old = marked(lambda: net(x)).log_softmax(-1)  # WASTE: rows_in_parts
        for part in order.chunk(4):
            new = net(x[part]).log_softmax(-1)
            ratio = new - (new.detach() if old is None else old[part])
            (-ratio.exp().gather(1, y[part][:, None]).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def chosen_rows_of_a_teacher(layers: int, repaired: bool, marked: Marked) -> Step:
    teacher, net = Net(layers), Net(2)
    train = trained(net)

    def small(*_: object) -> None:
        torch.arange(9.0).sin()  # each call repeats it

    teacher.register_forward_pre_hook(small)

    @torch.no_grad()
    def soft_of(x: Tensor) -> Any:
        return teacher(x)

    def step() -> None:
        x = rows()
        soft, out = torch.cat([soft_of(part) for part in x.chunk(2)]), net(x)
        far = (out - soft).square().sum(-1).topk(128).indices
        again = soft[far] if repaired else soft_of(x[far])  # WASTE: chosen_rows_of_a_teacher
        train(F.mse_loss(out, soft) + F.l1_loss(out[far], again))

    return step


# Memory


class Parts(nn.Module):
    """A layer whose two children are checkpointed, each by itself; or the layer as a whole."""

    def __init__(self, repaired: bool) -> None:
        super().__init__()
        self.norm, self.block = nn.GroupNorm(8, WIDTH), Block()
        self.repaired = repaired

    def forward(self, x: Tensor) -> Any:
        if self.repaired:
            return checkpoint(self.all_of_it, x, use_reentrant=False)
        x = checkpoint(self.norm, x, use_reentrant=False)  # WASTE: between
        return checkpoint(self.block, x, use_reentrant=False)

    def all_of_it(self, x: Tensor) -> Any:
        return self.block(self.norm(x))


def between(layers: int, repaired: bool, marked: Marked) -> Step:
    net = nn.Sequential(*(Parts(repaired) for _ in range(layers)), nn.Linear(WIDTH, CLASSES))
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows(2048)), labels(2048)))


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class WrappedParts(Parts):
    """The two children are of one class."""

    def __init__(self, repaired: bool) -> None:
        super().__init__(repaired)
        self.norm, self.block = Wrapped(self.norm), Wrapped(self.block)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        if self.repaired:
            return super().forward(x)
        x = checkpoint(self.norm, x, use_reentrant=False)  # WASTE: between_wrapped
        return checkpoint(self.block, x, use_reentrant=False)


def between_wrapped(layers: int, repaired: bool, marked: Marked) -> Step:
    net = nn.Sequential(*(WrappedParts(repaired) for _ in range(layers)), nn.Linear(WIDTH, CLASSES))
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows(2048)), labels(2048)))


def held_until_the_next_step(layers: int, repaired: bool, marked: Marked) -> Step:
    net, held = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), []
    train = trained(net)

    def step() -> None:
        nonlocal held
        x, features = rows(2048), []
        for layer in net:
            x = layer(x).sin()  # WASTE: held_until_the_next_step
            features.append(x)
        loss = x.square().mean()
        held = [] if repaired else features
        del x, features
        train(loss)

    return step


class Kept(torch.autograd.Function):
    """Keeps its result as an attribute: a cycle that only the garbage collector breaks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.kept = x.sin()  # WASTE: cycle
        return ctx.kept

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.kept.cos()


def cycle(layers: int, repaired: bool, marked: Marked) -> Step:
    net = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
    train = trained(net)

    def run(layer: nn.Module, x: Tensor) -> Any:
        x = layer(x)
        return (x.sin() if repaired else Kept.apply(x)).sin()  # WASTE: cycle

    def step() -> None:
        x = rows(2048)
        for layer in net:
            x = checkpoint(run, layer, x, use_reentrant=False)  # WASTE: cycle
        train(x.square().mean())

    return step


def held_features(layers: int, repaired: bool, marked: Marked) -> Step:
    net = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
    train = trained(net)

    def step() -> object:
        x, held = rows(2048), []
        for layer in net:
            x = layer(x).relu()
            copied = x.detach() + 1.0  # WASTE: held_features
            if not repaired:
                held.append(copied)
        total = sum(float(one.mean()) for one in held)
        train(x.square().mean())
        return total

    return step


def held_logits(layers: int, repaired: bool, marked: Marked) -> Step:
    net = Net(layers, 2048)
    train = trained(net)

    def step() -> object:
        y = labels(1024, 2048)
        logits = net(rows(1024))
        doubled = logits.detach() * 2.0  # WASTE: held_logits
        highest = doubled.max().item()
        loss = F.cross_entropy(logits, y)
        if repaired:
            del doubled, logits
        train(loss)
        return highest

    return step


_DEPTHS = (3, 12)
_RESULT = 2048 * WIDTH * 4
PLANTED = {
    "old_log_probabilities": Planted("repeated", old_log_probabilities, _DEPTHS),
    "old_log_probabilities_of_a_reentrant_model": Planted(
        "repeated", old_log_probabilities_of_a_reentrant_model, _DEPTHS, counted=False
    ),
    "encoder_twice": Planted("repeated", encoder_twice, _DEPTHS),
    "teacher_twice": Planted("repeated", teacher_twice, _DEPTHS),
    "table_in_each_layer": Planted("repeated", table_in_each_layer, _DEPTHS),
    "chosen_rows_of_a_teacher": Planted(
        "repeated-rows", chosen_rows_of_a_teacher, _DEPTHS, counted=False
    ),
    "between_wrapped": Planted("between", between_wrapped, (4, 12), lambda n: n * _RESULT),
    "held_until_the_next_step": Planted("after-backward", held_until_the_next_step, (4, 12)),
    "rows_in_parts": Planted("repeated-rows", rows_in_parts, _DEPTHS),
    "encoder_for_each_loss": Planted("repeated", encoder_for_each_loss, _DEPTHS),
    "metric_of_a_function": Planted("unread", metric_of_a_function, _DEPTHS),
    "gradients_of_convolutions": Planted(
        "unread-gradient", gradients_of_convolutions, _DEPTHS, counted=False
    ),
    "head_for_nobody": Planted("unread", head_for_nobody, _DEPTHS),
    "dropped_metric": Planted("unread", dropped_metric, _DEPTHS),
    "gradients_for_nobody": Planted(
        "unread-gradient", gradients_for_nobody, _DEPTHS, counted=False
    ),
    "recompute_tail": Planted("unread-recompute", recompute_tail, _DEPTHS, counted=False),
    "between": Planted("between", between, (2, 4, 8, 12, 16), lambda n: n * _RESULT),
    "cycle": Planted("after-backward", cycle, (2, 4, 12, 16)),
    "held_features": Planted("never-read", held_features, (4, 8, 12), lambda n: n * _RESULT),
    "held_logits": Planted("never-read", held_logits, (2, 4, 12), lambda _: 2 * 1024 * 2048 * 4),
}  # fmt: skip


# Ordinary trainings of one size


def evaluated_in_inference_mode() -> Step:
    net, x, y = Net(3), rows(), labels()
    train = trained(net)

    def step() -> float:
        train(F.cross_entropy(net(rows()), y))
        with torch.inference_mode():
            return float((net(x).argmax(-1) == y).double().mean())

    return step


def checkpointed_with_dropout() -> Step:
    net, drop, head = Net(3, WIDTH, reentrant=False), nn.Dropout(0.1), nn.Linear(WIDTH, 10)
    train = trained(net, head)
    return lambda: train(F.cross_entropy(head(drop(net(rows()))), labels()))


def two_forwards_with_other_dropout() -> Step:
    net = nn.Sequential(nn.Dropout(0.2), Net(3))
    train = trained(net)

    def step() -> None:
        x, y = rows(), labels()
        one, other = net(x), net(x)
        apart = F.kl_div(one.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        train(F.cross_entropy(one, y) + F.cross_entropy(other, y) + apart)

    return step


def averaged_weights() -> Step:
    net, teacher = Net(3), Net(3)
    train = trained(net)

    def step() -> None:
        x, y = rows(), labels()
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        train(F.cross_entropy(net(x), y) + F.cross_entropy(net(x[:1]), soft[:1]))
        with torch.no_grad():
            for mean, one in zip(teacher.parameters(), net.parameters(), strict=True):
                mean.lerp_(one, 0.01)

    return step


def written_through_numpy() -> Step:
    net = Net(3)
    train = trained(net)

    def step() -> None:
        x, y = rows(), labels()
        first = F.cross_entropy(net(x), y)
        x.numpy()[:] *= 2.0
        train(first + F.cross_entropy(net(x), y))

    return step


def written_through_an_earlier_view() -> Step:
    net, table, y = Net(3), rows(), labels()
    view = table.numpy()
    train = trained(net)

    def step() -> None:
        first = F.cross_entropy(net(table), y)
        view[:] *= 0.9
        train(first + F.cross_entropy(net(table), y))

    return step


def weights_changed_through_data() -> Step:
    net = Net(3)
    train = trained(net)

    def step() -> None:
        x = rows()
        with torch.no_grad():
            before = net(x).log_softmax(-1)
            for p in net.parameters():
                p.data.mul_(0.99)
        train(F.kl_div(net(x).log_softmax(-1), before, log_target=True, reduction="batchmean"))

    return step


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(3, 1)

    def forward(self, state: Tensor, action: Tensor) -> Any:
        return self.net(state + action)


def other_actions_in_equal_states() -> Step:
    train = trained(net := Critic())

    def step() -> None:
        x = rows()
        with torch.no_grad():
            best = net(x, rows())
        train((net(x, rows()) - best).square().mean())

    return step


def evaluated_without_dropout() -> Step:
    train = trained(net := nn.Sequential(Net(3, WIDTH), nn.Dropout(0.2), Net(3)))

    def step() -> None:
        x = rows()
        with torch.no_grad():
            soft = net.eval()(x[:64]).softmax(-1)
        train(F.cross_entropy(net.train()(x)[:64], soft))

    return step


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.adapter, self.on = Net(3), nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Any:
        return self.net(x + self.adapter(x) if self.on else x)


def adapters_off_for_the_reference() -> Step:
    train = trained(net := Adapted())

    def step() -> None:
        x = rows()
        net.on = False
        with torch.no_grad():
            reference = net(x)
        net.on = True
        train((net(x) - reference).square().mean())

    return step


class Residual(nn.Module):
    def __init__(self, narrows: bool) -> None:
        super().__init__()
        self.net, self.down = Net(2, WIDTH), nn.Tanh() if narrows else None

    def forward(self, x: Tensor) -> Any:
        x = self.net(x)
        return x if self.down is None else self.down(x)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(narrows) for narrows in (True, False))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def stages_of_checkpointed_blocks() -> Step:
    net = nn.Sequential(*(Stage() for _ in range(4)), nn.Linear(WIDTH, CLASSES))
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows(2048)), labels(2048)))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return grads[0] * (gate * (1 + x * (1 - gate)))


def function_that_repeats_its_forward() -> Step:
    one, other = nn.Linear(WIDTH, 512), nn.Linear(512, 10)
    train = trained(one, other)
    return lambda: train(F.cross_entropy(other(Swish.apply(one(rows()))), labels()))


def penalty_on_gradients() -> Step:
    net = Net(3, 1)
    train = trained(net)

    def step() -> None:
        x = rows(grad=True)
        y = net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        train(y.mean() + (slope.norm(dim=1) - 1).square().mean())

    return step


def gathered_scores() -> Step:
    """Autograd keeps what is gathered from, for its size alone."""
    train = trained(net := Net(3, 2048))
    return lambda: train(net(rows(1024)).gather(1, labels(1024)[:, None]).square().mean())


class Selective(Block):
    """A layer that is checkpointed as a whole, in its own forward, and keeps its products."""

    def forward(self, x: Tensor) -> Any:
        products = [torch.ops.aten.addmm.default]
        keep = partial(create_selective_checkpoint_contexts, products)
        return checkpoint(self.inside, x, use_reentrant=False, context_fn=keep)

    def inside(self, x: Tensor) -> Any:
        return super().forward(x).tanh()


def products_kept() -> Step:
    net = nn.Sequential(*(Selective() for _ in range(3)), nn.Linear(WIDTH, CLASSES))
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows(1024)), labels(1024)))


def batch_statistics() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    train = trained(net, momentum=0.9)

    def step() -> None:
        images, y = torch.randn(8, 3, 48, 48), labels(8)
        with torch.no_grad():
            net(images)  # moves the running statistics
        train(F.cross_entropy(net(images), y))

    return step


ALONE: dict[str, Callable[[], Step]] = {
    one.__name__: one
    for one in (
        evaluated_in_inference_mode, checkpointed_with_dropout, two_forwards_with_other_dropout,
        averaged_weights, written_through_numpy, written_through_an_earlier_view,
        weights_changed_through_data, function_that_repeats_its_forward, penalty_on_gradients,
        gathered_scores, batch_statistics, products_kept, other_actions_in_equal_states,
        evaluated_without_dropout, adapters_off_for_the_reference, stages_of_checkpointed_blocks,
    )
}  # fmt: skip


# Ordinary trainings; each gets its layers


def _plain(**options: Any) -> Callable[[int], Step]:
    def make(layers: int) -> Step:
        net = Net(layers, reentrant=options.get("reentrant"))
        train = trained(net, kind=options.get("kind", torch.optim.SGD))
        return lambda: train(F.cross_entropy(net(rows()), labels()))

    return make


def _accumulated(layers: int) -> Step:
    net = Net(layers)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        for _ in range(3):
            (F.cross_entropy(net(rows(128)), labels(128)) / 3).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adversarial(layers: int) -> Step:
    generator, judge = Net(layers, WIDTH), Net(layers, 1)
    first, second = (torch.optim.Adam(one.parameters()) for one in (generator, judge))

    def step() -> None:
        made = generator(rows())
        second.zero_grad()
        (F.softplus(-judge(rows())).mean() + F.softplus(judge(made.detach())).mean()).backward()
        second.step()
        judge.requires_grad_(False)
        first.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        first.step()
        judge.requires_grad_(True)

    return step


class _Low(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def _low_rank(layers: int) -> Step:
    net = nn.Sequential(*(_Low() for _ in range(layers)), nn.Linear(WIDTH, CLASSES))
    train = trained(net)
    return lambda: train(F.cross_entropy(net(rows()), labels()))


def _experts(layers: int) -> Step:
    experts = nn.ModuleList(Block() for _ in range(4))
    net, gate = Net(layers, WIDTH), nn.Linear(WIDTH, 4)
    train = trained(net, gate, experts)

    def step() -> None:
        x = net(rows())
        weight, chosen = gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(experts):
            there = (chosen == at).nonzero()[:, 0]
            out = out.index_add(0, there, expert(x[there]) * weight[there, None])
        train(out.square().mean())

    return step


def _diffusion(layers: int) -> Step:
    frozen, net = Net(layers, WIDTH).requires_grad_(False), Net(layers, WIDTH)
    train = trained(net)

    def step() -> None:
        with torch.no_grad():
            latent = frozen(rows())
        noise, time = torch.randn_like(latent), torch.rand(len(latent), 1)
        train(F.mse_loss(net(latent * (1 - time) + noise * time), noise))

    return step


def _twins(layers: int) -> Step:
    net, guess = Net(layers, WIDTH), nn.Linear(WIDTH, WIDTH)
    train = trained(net, guess)

    def step() -> None:
        x = rows()
        one, other = (net(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        first = F.cosine_similarity(guess(one), other.detach()).mean()
        train(-first - F.cosine_similarity(guess(other), one.detach()).mean())

    return step


def _recurrent(layers: int) -> Step:
    net, head = nn.LSTM(WIDTH, WIDTH, min(layers, 3), batch_first=True), nn.Linear(WIDTH, CLASSES)
    train = trained(net, head)
    return lambda: train(
        F.cross_entropy(head(net(torch.randn(16, 12, WIDTH))[0][:, -1]), labels(16))
    )


def _attention(layers: int) -> Step:
    one = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True, dropout=0.1)
    net, head = nn.TransformerEncoder(one, layers), nn.Linear(WIDTH, CLASSES)
    train = trained(net, head)
    return lambda: train(F.cross_entropy(head(net(torch.randn(8, 16, WIDTH))[:, 0]), labels(8)))


ORDINARY: dict[str, Callable[[int], Step]] = {
    "plain": _plain(),
    "adamw": _plain(kind=torch.optim.AdamW),
    "adagrad": _plain(kind=torch.optim.Adagrad),
    "checkpointed": _plain(reentrant=False),
    "accumulated": _accumulated,
    "adversarial": _adversarial,
    "low_rank": _low_rank,
    "experts": _experts,
    "diffusion": _diffusion,
    "twins": _twins,
    "recurrent": _recurrent,
    "attention": _attention,
}
ORDINARY_LAYERS = (2, 4, 8, 12)
