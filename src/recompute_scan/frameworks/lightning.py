"""Lightning's and Fabric's ``FSDPStrategy``.

``_setup_activation_checkpointing`` in ``lightning/fabric/strategies/fsdp.py`` applies torch's
wrapper, unless a ``CheckpointWrapper`` is there already; it does not look at the model's flags.
``DeepSpeedStrategy``'s settings only configure DeepSpeed's own function and turn nothing on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Edit, Flaw, Setting, SettingSwitch, Values
from recompute_scan.frameworks.detect import Signature, innermost

_POLICIES = {"activation_checkpointing", "activation_checkpointing_policy"}
_ISSUES = "https://github.com/Lightning-AI/pytorch-lightning/issues/"

MECHANISM = replace(
    pytorch.WRAPPER,
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
    begins: set[tuple[str, ...]] = set()
    for path, setting in values.items():
        if path[-1:] != ("class_path",) or not str(setting.value).endswith("FSDPStrategy"):
            continue
        begins = begins or {other[:size] for other in values for size in range(1, len(other) + 1)}
        given = {name for name in _POLICIES if (*path[:-1], "init_args", name) in begins}
        if given == _POLICIES:
            yield from refused(given, setting.line)


def refused(given: set[str], line: int) -> Iterator[Flaw]:
    """Two arguments of one strategy, of which it takes one."""
    if given >= _POLICIES:
        yield Flaw(
            line,
            "RS604",
            "activation_checkpointing and activation_checkpointing_policy are both given",
            "Lightning's FSDPStrategy raises a ValueError.",
            "Keep activation_checkpointing_policy.",
        )


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """The classes that a strategy's policy names."""
    if path[-2:-1] == ("activation_checkpointing_policy",) and "init_args" in path:
        layers = f"each {str(setting.value).rpartition('.')[2]}"
        yield SettingSwitch("Lightning's strategy", layers, "non-reentrant")


def signatures() -> tuple[Signature, ...]:
    """Failures that are its own."""
    return (
        Signature(
            code="RS201",
            name="weights-only-sharded-save",
            cause_name="optimizer-states",
            error="KeyError",
            message=re.compile(r"^'optimizer_states'$"),
            where=innermost(r"lightning/\S*strategies/\S+:\S*save_checkpoint$"),
            title=(
                "Lightning looked for optimizer state in a checkpoint that was to hold weights only"
            ),
            cause=(
                "With state_dict_type='sharded', FSDPStrategy.save_checkpoint removes "
                "'optimizer_states' from the checkpoint, but "
                "ModelCheckpoint(save_weights_only=True) left it out."
            ),
            fix=("Upgrade to lightning 2.2.2 or later, or save with save_weights_only=False."),
            versions="lightning up to 2.2.1 (read in 2.1.4, 2.2.0 and 2.2.1); fixed in 2.2.2.",
            sources=(f"{_ISSUES}19492",),
            checked="reproduced",
        ),
        Signature(
            code="RS206",
            name="checkpoint-folder-not-empty",
            cause_name="exists",
            error="FileExistsError",
            message=re.compile(r"The checkpoint directory already exists and is not empty"),
            title="A sharded checkpoint was to be written over an older one",
            cause=(
                "A sharded checkpoint is a folder, and Fabric does not write into a folder with "
                "files."
            ),
            fix=(
                "Save under a new name, or remove the old folder first (on one rank, then a "
                "barrier)."
            ),
            versions="Fabric 2.1.0; later versions write into it (XLA's strategy still refuses).",
            sources=(f"{_ISSUES}18881",),
        ),
        Signature(
            code="RS125",
            name="second-checkpoint-warned",
            cause_name="lightning",
            message=re.compile(r"the model already contains checkpointed layers"),
            notice=True,
            severity="warning",
            title="Lightning found checkpoint wrappers in the model and left its own policy out",
            cause=("Checkpointing is configured in the strategy and in the model's code."),
            fix=("Keep the strategy's policy and remove the wrappers from the model's code."),
            versions="Lightning 2.1 and later.",
            sources=("https://github.com/Lightning-AI/pytorch-lightning/pull/18006",),
        ),
    )
