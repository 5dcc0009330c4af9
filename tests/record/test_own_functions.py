"""Checkpoint functions that people write themselves: recognised, and named by the user's line."""

from pathlib import Path
from typing import Any

import pytest
import torch

from recompute_scan.record.checkpoint_calls import own_functions, recomputes
from tests.record.runs import LAYERS, record_script


def _again(ctx: Any, grad: Any) -> Any:
    with torch.enable_grad():
        y = ctx.function(ctx.x)
    return torch.autograd.grad(y, ctx.x, grad)


class Direct(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            y = ctx.function(ctx.x)
        torch.autograd.backward(y, grads)
        return None, ctx.x.grad


class ThroughAHelper(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_again(ctx, grads)


class InAnInnerFunction(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def run() -> Any:
            torch.set_grad_enabled(True)
            return torch.autograd.grad(ctx.function(ctx.x), ctx.x, grads)

        return run()


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_again(ctx, grads)


class Formula(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0] * ctx.x.grad


class Again(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            return None, grads[0] * ctx.function(ctx.x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Direct, True),
        (ThroughAHelper, True),
        (InAnInnerFunction, True),
        (Decorated, True),
        (Formula, False),
        (Again, False),  # it starts no backward pass of its own
        (torch.autograd.Function, False),
    ],
)
def test_what_the_code_of_a_backward_shows(function: Any, expected: bool) -> None:
    assert recomputes(function.backward) == expected


def test_torchs_own_are_left_to_others() -> None:

    assert not [f for f in own_functions() if f.__module__.startswith("torch")]


FUNCTIONS = """\
class NAME(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, fn, length, *args):
        ctx.fn, ctx.inputs, ctx.weights = fn, args[:length], args[length:]
        with torch.no_grad():
            return fn(*ctx.inputs)
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, *grads):
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            y = ctx.fn(*inputs)
        return None, None, *torch.autograd.grad(y, (*inputs, *ctx.weights), grads)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
    def forward(self, x):
        for layer in self.layers:
            x = NAME.apply(GIVEN, 1, x, *layer.parameters())  # CALL
        return x

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "call"),
    [("GradCkpt", "NAME.apply"), ("_Rerun", "NAME.apply"), ("CheckpointFunction", "remat")],
)
def test_the_line_that_applies_it(tmp_path: Path, name: str, call: str) -> None:
    script = LAYERS + FUNCTIONS.replace("NAME.apply(GIVEN", f"{call}(layer.forward")
    # one helper for every block, whose line chooses nothing
    script = script.replace(
        "class Model", "def remat(f, *a):\n    return NAME.apply(f, *a)\n\nclass Model"
    )
    script = script.replace("NAME", name)
    recorded = record_script(tmp_path, script, steps=1)
    assert recorded.status == 0, recorded.stderr
    line = next(n for n, text in enumerate(script.splitlines(), 1) if text.endswith("# CALL"))
    trace = recorded.trace()
    assert [(m.module, m.mechanism, m.function, m.site) for m in trace.regions] == [
        (f"layers.{place}", "own-function", name, f"train.py:{line}") for place in range(2)
    ]
    assert sorted(trace.recomputes) == sorted(m.call for m in trace.regions)


@pytest.mark.slow
def test_a_module_stays_what_it_is_and_the_line_is_known(tmp_path: Path) -> None:
    script = LAYERS + FUNCTIONS.replace("NAME", "GradCkpt").replace("GIVEN", "layer")
    recorded = record_script(tmp_path, script, steps=1)
    assert recorded.status == 0, recorded.stderr
    line = next(n for n, text in enumerate(script.splitlines(), 1) if text.endswith("# CALL"))
    assert recorded.trace().regions == []
    assert recorded.info.functions == {"GradCkpt": f"train.py:{line}"}
