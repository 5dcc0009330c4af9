"""Programs in which a checkpoint may be inside another, made of parts; run to know their truth.

Each has four small layers, a model and two steps. ``test_nested.py`` counts how often the layers
run, without this tool.
"""

from tests.lint.cases import Case

_HEAD = """\
import torch
from functools import partial
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper)
def through(f, *args):
    return checkpoint(f, *args, use_reentrant=True)
def checkpointed(method):
    def wrapped(self, *args):
        return checkpoint(method, self, *args, use_reentrant=True)
    return wrapped
"""
_BLOCK = """\
class Block(nn.Module):
    wanted = {wanted}
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def inner(self, x):
        return x + self.b(self.a(x).relu())
"""
_OWN = {
    "a method": "def forward(self, x):\n    return checkpoint(self.inner, x, use_reentrant={v})\n",
    "a closure": "def forward(self, x):\n    def run(y):\n        return self.inner(y)\n"
    "    return checkpoint(run, x, use_reentrant={v})\n",
    "a helper": "def forward(self, x):\n    return through(self.inner, x)\n",
    "a decorator": "@checkpointed\ndef forward(self, x):\n    return self.inner(x)\n",
    "two parts": "def forward(self, x):\n    x = x + checkpoint(self.a, x, use_reentrant={v})\n"
    "    return x + checkpoint(self.b, x, use_reentrant={v})\n",
    "a flag": "def forward(self, x):\n    if self.wanted and self.training:\n"
    "        return checkpoint(self.inner, x, use_reentrant={v})\n    return self.inner(x)\n",
    "nothing": "def forward(self, x):\n    return self.inner(x)\n",
}
_MODEL = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
"""
_WAYS = {
    "plainly": "def forward(self, x):\n    for layer in self.layers:\n        x = layer(x)\n"
    "    return x\n",
    "a loop": "def forward(self, x):\n    for layer in self.layers:\n"
    "        x = checkpoint(layer, x, use_reentrant=False)\n    return x\n",
    "a factory": "def forward(self, x):\n    def made(module):\n        def run(*given):\n"
    "            return module(*given)\n        return run\n"
    "    for i, layer in enumerate(self.layers):\n"
    "        x = checkpoint(made(layer), x, use_reentrant=False)\n    return x\n",
    "segments": "def part(self, a, b):\n    def run(x):\n        for layer in self.layers[a:b]:\n"
    "            x = layer(x)\n        return x\n    return run\n"
    "def forward(self, x):\n    for k in (0, 2):\n"
    "        x = checkpoint(self.part(k, k + 2), x, use_reentrant=False)\n    return x\n",
}
_APPLIED = {
    "nothing": "",
    "applied": "apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))\n",
    "each": "for i, layer in enumerate(model.layers):\n"
    "    model.layers[i] = checkpoint_wrapper(layer)\n",
    "patched": "for layer in model.layers:\n"
    "    layer.forward = partial(checkpoint, layer.forward, use_reentrant=True)\n",
    "another class": "apply_activation_checkpointing(\n"
    "    model, check_fn=lambda m: isinstance(m, nn.Embedding))\n",
}
_STEPS = """\
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(2):
    model(torch.randn(2, 8, requires_grad=True)).square().mean().backward()
    optimizer.step()
"""


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _program(
    own: str, way: str, applied: str, v: bool = True, wanted: bool = True, files: int = 1
) -> dict[str, str]:
    block = _BLOCK.format(wanted=wanted) + _indented(_OWN[own].format(v=v))
    model = _MODEL + _indented(_WAYS[way])
    steps = "torch.manual_seed(0)\nmodel = Model()\n" + _APPLIED[applied] + _STEPS
    if files == 1:
        return {"train.py": _HEAD + block + model + steps}
    main = "def main():\n" + _indented(steps) + "if __name__ == '__main__':\n    main()\n"
    return {
        "layers_of_it.py": _HEAD + block,
        "model_of_it.py": _HEAD + "from layers_of_it import Block\n" + model,
        "train.py": _HEAD
        + "from layers_of_it import Block\nfrom model_of_it import Model\n"
        + main,
    }


_COUNTED = "counted: tests/lint/test_nested.py"
_TWICE, _ONCE, _NONE = ("RS601",), ("RS603",), ()
NESTED = tuple(
    Case(name, _program(*parts), codes, _COUNTED)
    for name, parts, codes in (
        ("own method, applied", ("a method", "plainly", "applied"), _TWICE),
        (
            "own method, applied, in three files",
            ("a method", "plainly", "applied", True, True, 3),
            _TWICE,
        ),
        ("own method, each wrapped in a loop", ("a method", "plainly", "each"), _TWICE),
        ("own closure, the model's loop", ("a closure", "a loop", "nothing"), _TWICE),
        ("own helper, a factory of closures", ("a helper", "a factory", "nothing"), _TWICE),
        ("own helper, in three files", ("a helper", "a loop", "nothing", True, True, 3), _TWICE),
        ("own decorator, forward patched", ("a decorator", "plainly", "patched"), _TWICE),
        ("own flag on, segments", ("a flag", "segments", "nothing"), _TWICE),
        ("two parts, both non-reentrant", ("two parts", "a loop", "nothing", False), _TWICE),
        ("segments of two, both non-reentrant", ("a method", "segments", "nothing", False), _TWICE),
        ("whole, both non-reentrant", ("a method", "plainly", "applied", False), _ONCE),
        ("closure, both non-reentrant", ("a closure", "a loop", "nothing", False), _ONCE),
        ("own flag off, applied", ("a flag", "plainly", "applied", True, False), _NONE),
        ("own method alone", ("a method", "plainly", "nothing"), _NONE),
        ("own method, another class wrapped", ("a method", "plainly", "another class"), _NONE),
        ("the model's loop alone", ("nothing", "a loop", "nothing"), _NONE),
        ("applied alone, in three files", ("nothing", "plainly", "applied", True, True, 3), _NONE),
    )
)
