"""A checkpoint's call site: mechanism, module, and the line that switched it on."""

import functools
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recompute_scan.record.attribution import CallSites, variables
from recompute_scan.record.execute import run_program
from recompute_scan.record.modules import (
    ModuleIndex,
    ModuleName,
    covered_modules,
    plain_name,
    real_class_name,
)
from tests.record.runs import LAYERS, record_script

MECHANISMS = (
    LAYERS
    + """\
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper,
)

class Special(Layer):
    pass

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.direct = Layer()
        self.closure = Layer()
        self.wrapped = nn.ModuleList([Special(), Special()])
        self.single = checkpoint_wrapper(Layer(), CheckpointImpl.REENTRANT)  # SINGLE
        self.hooked = composable(Layer())  # HOOKED
        self.parts = nn.Sequential(Layer(), Layer(), Layer(), Layer())

    def forward(self, x):
        x = checkpoint(self.direct, x, use_reentrant=True)  # DIRECT
        x = checkpoint(
            lambda y: self.closure(y) * 2,
            x,
            use_reentrant=False,
        )  # CLOSURE
        for layer in self.wrapped:
            x = layer(x)
        x = self.hooked(self.single(x=x))
        return checkpoint_sequential(self.parts, 2, x, use_reentrant=False)  # PARTS

model = Model()
apply_activation_checkpointing(  # WRAPPED
    model,
    check_fn=lambda module: isinstance(module, Special),
)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    optimizer.step()
"""
)


def lines_marked(text: str) -> dict[str, str]:
    """``# NAME`` comments of the script by name, as ``file:line``."""
    return {
        line.rpartition("# ")[2]: f"train.py:{number}"
        for number, line in enumerate(text.splitlines(), 1)
        if "  # " in line
    }


@pytest.mark.slow
def test_every_way_of_torchs_own(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, MECHANISMS, steps=1)
    assert (recorded.status, recorded.stderr) == (0, "")
    at = lines_marked(MECHANISMS)
    closure = f"train.py:{int(at['CLOSURE'].rpartition(':')[2]) - 4}"
    found = [
        (m.module, m.module_class, m.mechanism, m.variant, m.site) for m in recorded.trace().regions
    ]
    assert found == [
        ("direct", "Layer", "torch-checkpoint", "reentrant", at["DIRECT"]),
        ("", "Model", "torch-checkpoint", "non-reentrant", closure),
        ("wrapped.0", "Special", "fsdp-wrapper", "non-reentrant", at["WRAPPED"]),
        ("wrapped.1", "Special", "fsdp-wrapper", "non-reentrant", at["WRAPPED"]),
        ("single", "Layer", "fsdp-wrapper", "reentrant", at["SINGLE"]),
        ("hooked", "Layer", "composable-checkpoint", "non-reentrant", at["HOOKED"]),
        ("parts.0-1", "Layer", "checkpoint-sequential", "non-reentrant", at["PARTS"]),
    ]
    sources = recorded.info.sources
    assert set(sources) == {site for *_, site in found}
    assert sources[at["DIRECT"]].statement == (
        "x = checkpoint(self.direct, x, use_reentrant=True)  # DIRECT"
    )
    assert sources[at["WRAPPED"]].statement.splitlines()[1:] == [
        "    model,",
        "    check_fn=lambda module: isinstance(module, Special),",
        ")",
    ]


HUGGING_FACE = """\
import os, subprocess, torch, warnings
from transformers import LlamaConfig, LlamaForCausalLM
warnings.simplefilter("ignore")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, use_cache=False,
)
model = LlamaForCausalLM(config)
def switch_on(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
switch_on(model)
os.chdir("/")
tokens = torch.randint(0, 32, (2, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(9):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_transformers_names_the_line_that_enabled_it(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, HUGGING_FACE, steps=1)
    assert recorded.status == 0, recorded.stderr
    found = {(m.module, m.module_class, m.mechanism, m.variant) for m in recorded.trace().regions}
    assert found == {
        (f"model.layers.{i}", "LlamaDecoderLayer", "hf-gradient-checkpointing", "reentrant")
        for i in range(2)
    }
    line = HUGGING_FACE.splitlines().index(
        '    model.gradient_checkpointing_enable({"use_reentrant": True})'
    )
    assert {annotation.site for annotation in recorded.trace().regions} == {f"train.py:{line + 1}"}
    assert recorded.info.sources[f"train.py:{line + 1}"].alone


@pytest.mark.slow
def test_a_call_in_a_library_is_named_by_the_users_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "somelib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "blocks.py").write_text(
        "from torch.utils.checkpoint import checkpoint\n"
        "def run(layer, x):\n"
        "    return checkpoint(layer, x, use_reentrant=False)\n"
    )
    script = LAYERS + (
        "sys.path.insert(0, 'site-packages')\n"
        "from somelib.blocks import run\n"
        "model = Layer()\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "for step in range(9):\n"
        "    run(model, torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    recorded = record_script(tmp_path, script, steps=1)
    line = script.splitlines().index("    run(model, torch.randn(4, 8)).sum().backward()") + 1
    (annotation,) = recorded.trace().regions
    assert annotation.site == f"train.py:{line}"
    assert (annotation.mechanism, annotation.function) == (
        "library-checkpoint",
        "somelib.blocks.run",
    )
    source = recorded.info.sources[annotation.site]
    assert source.statement.startswith("run(model,")
    assert not source.installed


@pytest.mark.slow
def test_what_a_recompute_calls_again_keeps_its_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "somelib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(
        "from torch import nn\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "class Ready(nn.Module):\n"
        "    def __init__(self, layer):\n"
        "        super().__init__()\n"
        "        self.layer = layer\n"
        "    def forward(self, x):\n"
        "        x = checkpoint(self.layer, x, use_reentrant=True)\n"
        "        return checkpoint(self.inside, x, use_reentrant=True)\n"
        "    def inside(self, x):\n"
        "        return checkpoint(self.layer, x, use_reentrant=True)\n"
    )
    script = LAYERS + (
        "sys.path.insert(0, 'site-packages')\n"
        "from somelib import Ready\n"
        "model = Ready(Layer())\n"
        "optimizer = torch.optim.SGD(model.parameters(), 1e-3)\n"
        "for step in range(9):\n"
        "    loss = model(torch.randn(4, 8, requires_grad=True)).sum()  # MODEL\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    recorded = record_script(tmp_path, script, steps=1)
    assert recorded.status == 0, recorded.stderr
    annotations = recorded.trace().regions
    assert len(annotations) == 4  # three in the forward pass, one again in a recompute
    assert {(m.mechanism, m.site) for m in annotations} == {
        ("library-checkpoint", lines_marked(script)["MODEL"])
    }


TWO_MODELS = (
    LAYERS
    + """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())
    def forward(self, x):
        return self.layers(x)

def main():
    generator, critic = Net(), Net()
    frozen = Net().requires_grad_(False)
    chosen = lambda module: isinstance(module, Layer)
    apply_activation_checkpointing(generator, check_fn=chosen)  # G
    apply_activation_checkpointing(critic, check_fn=chosen)  # C
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()], 1e-3)
    for step in range(9):
        (critic(generator(torch.randn(4, 8))) + frozen(torch.ones(4, 8))).sum().backward()
        optimizer.step()
main()
"""
)


@pytest.mark.slow
def test_two_models_with_the_same_names_are_told_apart(tmp_path: Path) -> None:
    recorded = record_script(tmp_path, TWO_MODELS, steps=1)
    assert recorded.status == 0, recorded.stderr
    at = lines_marked(TWO_MODELS)
    assert [(m.module, m.site) for m in recorded.trace().regions] == [
        ("generator.layers.0", at["G"]),
        ("generator.layers.1", at["G"]),
        ("critic.layers.0", at["C"]),
        ("critic.layers.1", at["C"]),
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def closure_over(module: nn.Module) -> Callable[..., object]:
    return lambda x: module(x * 2)


def closure_over_two(outer: nn.Module, inner: nn.Module) -> Callable[..., object]:
    return lambda x: (outer, inner(x))


BLOCK = Block()


def look_at_two() -> tuple[ModuleIndex, nn.Module, nn.Module, bool]:
    """Names in two models, those, and whether what else was in a variable has gone since."""
    generator, critic = nn.Sequential(Block()), nn.Sequential(Block())
    for parameter in [*generator.parameters(), *critic.parameters()]:
        parameter.grad = torch.zeros_like(parameter)
    gone = torch.ones(1)
    seen = weakref.ref(gone)
    index = ModuleIndex()
    index.rebuild()
    del gone
    return index, generator[0], critic[0], seen() is None


def test_variables_that_were_looked_at_are_not_kept() -> None:
    """In a process of its own: models that other tests keep would be looked at too."""
    code = (
        "from tests.record.test_sites import look_at_two\n"
        "index, generator, critic, gone = look_at_two()\n"
        "print(gone, index.look_up([generator]).name, index.look_up([critic]).name)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["True", "generator.0", "critic.0"]


def test_a_function_that_may_hold_its_variables_is_not_looked_into() -> None:
    def held(settings: int) -> tuple[dict[str, object], dict[str, object]]:
        kept = locals()
        later = settings + 1
        return kept, variables(sys._getframe()) if later else {}

    kept, shown = held(1)
    assert kept == {"settings": 1}
    assert set(shown) == ({"kept", "later", "settings"} if sys.version_info >= (3, 13) else set())


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (BLOCK, (), [BLOCK]),
        (checkpoint_wrapper(BLOCK), (), [BLOCK]),
        (BLOCK.run, (), [BLOCK]),
        (BLOCK.__call__, (), [BLOCK]),
        (functools.partial(Block.run, BLOCK), (), [BLOCK]),
        (functools.partial(BLOCK, flag=1), (), [BLOCK]),
        (closure_over(BLOCK), (), [BLOCK]),
        (closure_over_two(BLOCK, BLOCK.inner), (), [BLOCK.inner]),
        (functools.partial(closure_over(BLOCK), 1), (), [BLOCK]),
        (lambda module, x: module(x), (torch.ones(1), BLOCK), [BLOCK]),
        (len, (torch.ones(1),), []),
    ],
)
def test_the_module_behind_a_function(
    function: object, args: tuple[object, ...], expected: list[nn.Module]
) -> None:
    assert covered_modules(function, args) == expected


def test_what_runs_the_script_is_nobodys_line() -> None:
    """Of an installed module that is run, the outermost line of a library is its own."""
    frames = {
        "trl.scripts.sft": "def inner(then): return then()",
        run_program.__module__: "def ours(then, call): return call(then)",
        "click.core": "def outer(then, call, ours): return ours(then, call)",
    }
    inner, ours, outer = (made_in(name, text) for name, text in frames.items())
    sites = CallSites(Path("/nowhere"))
    found = outer(lambda: sites.switched_on_at(sys._getframe(1)), inner, ours)
    assert found == "trl/scripts/sft.py:1"


def made_in(name: str, text: str) -> Callable[..., Any]:
    """The function that a text defines, as if a module of site-packages had it."""
    made: dict[str, Any] = {"__name__": name}
    file = f"/lib/site-packages/{name.replace('.', '/')}.py"
    exec(compile(text, file, "exec"), made)
    return next(one for one in made.values() if isinstance(one, FunctionType))


def test_what_a_closure_runs_beside_the_one_that_names_it() -> None:
    norm, act, lin = nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4)
    whole = nn.Sequential(norm, act, lin)

    def run(x: torch.Tensor) -> object:
        return lin(act(norm(x))) if len(whole) else x

    assert covered_modules(run) == [act]
    assert covered_modules(run, every=True) == [act, lin, norm]
    assert covered_modules(closure_over_two(BLOCK, BLOCK.inner), every=True) == [BLOCK.inner]


def test_a_name_comes_from_the_largest_model_and_without_wrappers() -> None:
    block = Block()
    small = nn.Sequential(checkpoint_wrapper(block))
    index = ModuleIndex()
    index.rebuild()
    assert index.look_up([block]) == ModuleName("0", "Block")
    large = nn.ModuleDict({"module": nn.ModuleDict({"trunk": small, "head": nn.Linear(2, 2)})})
    index.rebuild()
    assert index.look_up([block]) == ModuleName("trunk.0", "Block")
    assert index.look_up([]) == ModuleName()
    assert len(large) == 1


def test_a_module_made_after_the_index_is_found_all_the_same() -> None:
    index = ModuleIndex()
    index.rebuild()
    model = nn.Sequential(Block())
    assert index.look_up([model[0]]) == ModuleName("0", "Block")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.module.model.layers.3", "model.layers.3"),
        (
            "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp",
            "layers.0.mlp",
        ),
        ("_orig_mod", ""),
        ("encoder.module.x", "encoder.module.x"),
    ],
)
def test_wrappers_leave_no_trace_in_a_name(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_the_class_below_fully_shard() -> None:
    marker = type("FSDPModule", (), {})
    sharded = type("FSDPBlock", (marker, Block), {})
    assert real_class_name(sharded()) == "Block"


def test_a_site_below_the_start_folder_is_relative(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    frame = sys._getframe()
    below = CallSites(here.parent).called_at(frame)
    assert below == f"{here.name}:{frame.f_lineno - 1}"
    elsewhere = CallSites(tmp_path).switched_on_at(frame)
    assert elsewhere == f"{here}:{frame.f_lineno - 1}"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_site_below_a_folder_above_the_home_is_absolute(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(__file__).resolve()
    home, start = here.parents[level], here.parents[1]
    monkeypatch.setenv("HOME", str(home))
    frame = sys._getframe()
    shown = here if start in home.parents else here.relative_to(start)
    assert CallSites(start).called_at(frame) == f"{shown}:{frame.f_lineno}"
