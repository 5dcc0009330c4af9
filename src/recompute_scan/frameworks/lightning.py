"""Lightning's and Fabric's ``FSDPStrategy``.

``_setup_activation_checkpointing`` in ``lightning/fabric/strategies/fsdp.py`` applies torch's
wrapper, unless a ``CheckpointWrapper`` is there already; it does not look at the model's flags.
``DeepSpeedStrategy``'s settings only configure DeepSpeed's own function and turn nothing on.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from recompute_scan.frameworks import fsdp
from recompute_scan.frameworks.configuration import Flaw, Setting, Switch, Values
from recompute_scan.frameworks.mechanism import Edit

MECHANISM = replace(
    fsdp.BASE,
    name="lightning-fsdp",
    title="Lightning's activation_checkpointing_policy",
    keep=70,
    keep_sharded=110,
    remove="leave activation_checkpointing_policy out of FSDPStrategy(…)",
    docs="https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html",
    packages=("lightning", "pytorch-lightning"),
    checked="ran here (lightning 2.6.6: its set-up function; the strategy needs a GPU)",
    variants=("lightning 2.x: non-reentrant (explicit below torch 2.2)",),
    caution="Look whether the strategy is shared with other jobs.",
    switched_by=(
        "lightning/fabric/strategies/fsdp.py:*",
        "lightning_fabric/strategies/fsdp.py:*",
        "lightning/pytorch/strategies/fsdp.py:*",
        "pytorch_lightning/strategies/fsdp.py:*",
    ),
    settings=(
        "lightning.fabric.strategies.fsdp:FSDPStrategy.__init__",
        "lightning.pytorch.strategies.fsdp:FSDPStrategy.__init__",
        "lightning_fabric.strategies.fsdp:FSDPStrategy.__init__",
        "pytorch_lightning.strategies.fsdp:FSDPStrategy.__init__",
    ),
    edits=(
        Edit("*", "keyword", "activation_checkpointing_policy", "None"),
        Edit("*", "keyword", "activation_checkpointing", "None"),
    ),
)


def flaws(values: Values) -> Iterator[Flaw]:
    """What a strategy that is written out in a configuration refuses."""
    for path, setting in values.items():
        if path[-1:] != ("class_path",) or not str(setting.value).endswith("FSDPStrategy"):
            continue
        given = {
            other[len(path)]
            for other in values
            if other[: len(path)] == (*path[:-1], "init_args") and len(other) > len(path)
        }
        yield from refused(given, setting.line)


def refused(given: set[str], line: int) -> Iterator[Flaw]:
    """Two arguments of one strategy, of which it takes one."""
    if {"activation_checkpointing", "activation_checkpointing_policy"} <= given:
        yield Flaw(
            line,
            "RS604",
            "activation_checkpointing and activation_checkpointing_policy are both given",
            "Lightning's FSDPStrategy raises a ValueError.",
            "Keep activation_checkpointing_policy.",
        )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[Switch]:
    """The classes that a strategy's policy names."""
    if path[-2:-1] == ("activation_checkpointing_policy",) and "init_args" in path:
        layers = f"each {str(setting.value).rpartition('.')[2]}"
        yield Switch("Lightning's strategy", layers, "non-reentrant")
