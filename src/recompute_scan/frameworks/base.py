"""A checkpoint mechanism: how it is recognized, kept or taken out, and set in configurations.

Also the sentences that say how each recommended change of a checkpoint affects gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Literal

from msgspec import Struct

CHECKPOINT_DOCS = "https://docs.pytorch.org/docs/stable/checkpoint.html"
SELECTIVE_DOCS = f"{CHECKPOINT_DOCS}#torch.utils.checkpoint.create_selective_checkpoint_contexts"
SHARDED_DOCS = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
#: Endings of files that hold settings.
CONFIGURATIONS = frozenset({".cfg", ".conf", ".ini", ".json", ".toml", ".yaml", ".yml"})


def is_configuration(file: str) -> bool:
    """Whether a file is a configuration by its name."""
    return PurePath(file).suffix in CONFIGURATIONS


_OFF = {"true": "false", "yes": "no", "on": "off", "1": "0"}
# Where nothing more particular is known.
FEWER = "leave {layers} out of {title}"
SELECTIVELY = (
    "switch {title} to its selective mode, or use checkpoint(…, use_reentrant=False, "
    "context_fn={context}) in its place"
)


def opposite(word: str) -> str | None:
    """``False`` for ``True``, in the same spelling; ``None`` for a word that is not a switch."""
    off = _OFF.get(word.lower())
    if off is None or word.islower():
        return off
    return off.upper() if word.isupper() else off.title()


class Edit(Struct, frozen=True):
    """How one statement of the user's code is changed to take a mechanism out.

    Attributes:
        call: Name of the function or method called in the statement; ``*`` for any call.
        how: ``delete`` the statement, where it is this call and nothing else; ``unwrap`` the
            call: its first argument takes its place; ``call`` the first argument with the
            others; set a ``keyword`` argument; set an ``entry`` of a dictionary written out in
            the call.
        name: Of the keyword or entry.
        value: What it is set to, as source code.
        add: Whether a keyword that is not there is added.
    """

    call: str
    how: Literal["delete", "unwrap", "call", "keyword", "entry"]
    name: str = ""
    value: str = "False"
    add: bool = False


class Rename(Struct, frozen=True):
    """A name that a package changed from a version on."""

    package: str
    since: str
    old: str
    new: str


class Before(Struct, frozen=True):
    """The advice where a package is older than a version."""

    package: str
    version: str
    words: str


class Mechanism(Struct, frozen=True):
    """One API or setting that turns checkpointing on.

    Places in code are written ``path:function`` with ``*`` and ``?`` as in file names, the path
    as below ``site-packages``. Entry points are written ``module:Class.method``.

    Attributes:
        name: As written into annotations and results.
        title: Its name in sentences.
        keep: Its rank when two are found; the higher is kept.
        keep_sharded: The same under FSDP, inside the units; 0 where it is not made for them.
        why_keep: The reason, one sentence without the full stop.
        renames: Words of ``remove`` that depend on a version; there the older ones stand.
        remove: How to take it out, one sentence without the full stop.
        docs: Page of the framework that documents it.
        checked: How these facts were checked, and at which version.
        variants: Variant by version, oldest first, for people.
        caution: A second effect or reader of the switch, so that taking it out needs a look;
            ``None`` without one.
        asks: Places that call the checkpoint function directly.
        switched_by: Places, one on the stack when checkpointing was switched on; empty when
            that does not matter.
        selective: Whether the call must have, or must not have, a ``context_fn``; ``None``
            when that does not matter.
        watched: Its ``autograd.Function`` classes, or functions where it has none, which ``run``
            marks: ``module:name``.
        functions: Names of ``autograd.Function`` classes that only it has; the profiler names
            their nodes after them.
        holding: Places that run the checkpointed function first and hold its frame.
        packages: Distributions that it comes in, with versions that bear on it.
        switches: Entry points that switch it on for the module they are called on, or given;
            ``package:*.method`` for the method of any class in a package.
        configured_by: Constructors that get its setting as an argument: ``module:Class.__init__``.
        on_by_default: Whether it is on where nothing sets it.
        feeds_inputs: Whether its switch makes the model's inputs ask for gradients as well, which
            reentrant checkpoints around frozen parts need.
        variables: Variables of the environment that set it too.
        edits: Changes to the statement at the call site, the first that fits is taken.
        fewer: How to leave out single layers: words with ``{layers}`` and ``{title}``.
        fewer_before: The same in older versions, each with the package and the version that
            ended it, oldest first.
        selectively: How to keep the results of chosen operators: words with ``{context}`` (the
            ``context_fn``) and ``{title}``.
        commands: Beginnings of commands that start training: ``accelerate launch``.
        launchers: Modules that start or serve training, which the recorded script is not.
        engines: Classes that wrap a model to train it in parallel, each with its name in sentences.
        calls: Words that show calls of its functions in a script; one is enough.
        backward: A pattern of places where its reentrant function, or a copy of it, recomputes.
        sharding: A pattern of places that are in a stack while the model is sharded by it.
        gathering: A pattern of places that put a sharded state together.
        stepping: A pattern of places, not in a file of an optimizer, that step one.
    """

    name: str
    title: str
    keep: int
    why_keep: str
    remove: str
    docs: str
    checked: str
    variants: tuple[str, ...]
    caution: str | None = None
    asks: tuple[str, ...] = ()
    switched_by: tuple[str, ...] = ()
    selective: bool | None = None
    watched: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    holding: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    configured_by: tuple[str, ...] = ()
    on_by_default: bool = False
    feeds_inputs: bool = False
    variables: tuple[str, ...] = ()
    keep_sharded: int = 0
    renames: tuple[Rename, ...] = ()
    edits: tuple[Edit, ...] = ()
    fewer: str = FEWER
    fewer_before: tuple[Before, ...] = ()
    selectively: str = SELECTIVELY
    commands: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()
    engines: tuple[tuple[str, str], ...] = ()
    calls: tuple[str, ...] = ()
    backward: str = ""
    sharding: str = ""
    gathering: str = ""
    stepping: str = ""


class Setting(Struct, frozen=True):
    """One value of a configuration file or command line.

    Attributes:
        path: Its keys, from the root on.
        value: As the file gives it.
        written: Its line, or the file's text where the parser gives no lines: few lines are ever
            asked for, and to find one takes a walk through the text.
    """

    path: tuple[str, ...]
    value: object
    written: int | str

    @property
    def line(self) -> int:
        """Where its last key is."""
        return self.written if isinstance(self.written, int) else _find(self.path, self.written)


Variant = Literal["reentrant", "non-reentrant", "default", "unknown"]
# The advice where files alone do not decide.
RUN = "`recompute-scan run` counts what happens."

# The settings of one file, by their paths.
Values = Mapping[tuple[str, ...], Setting]


class Flaw(Struct, frozen=True):
    """A mistake in settings alone: a finding of ``lint``, without its file.

    Attributes:
        line: The line to change.
        code: The rule's code.
        title: The mistake.
        why: Its effect, as read in the framework's own code.
        fix: The advice.
        edit: The advice as an edit of the line: set its value to false.
        unless: Words that make the settings right where a script that was read has one.
    """

    line: int
    code: str
    title: str
    why: str
    fix: str
    edit: Literal["", "off"] = ""
    unless: tuple[str, ...] = ()


class SettingSwitch(Struct, frozen=True):
    """A checkpoint that a setting switches on: who switches it on, its layers, its variant."""

    by: str
    layers: str
    variant: Variant


def truthy(value: object) -> bool:
    """Whether a setting is on, as accelerate and argument parsers read it."""
    return value is True or (
        isinstance(value, str) and value.strip().lower() in ("true", "yes", "on", "1", "y", "t")
    )


def value_of(settings: Iterable[Setting], *path: str) -> object:
    """The value at a path, or ``None``."""
    return next((s.value for s in settings if s.path == path), None)


def _find(path: tuple[str, ...], text: str) -> int:
    """The line of the last key, looked for after those before it."""
    start = 0
    for key in path:
        if key == "[]":
            continue
        quoted = re.escape(key)
        found = re.compile(rf"[\"'\[.]{quoted}[\"'\].]|^[^\S\n]*{quoted}[^\S\n]*=", re.MULTILINE)
        hit = found.search(text, start)
        start = hit.end() - 1 if hit else start
    return text.count("\n", 0, start) + 1


RANDOM_STATE = (
    "preserve_rng_state=False changes gradients if the block draws random numbers in training, as "
    "dropout does. The other fix does not."
)
NON_REENTRANT = (
    "Gradients stay the same; blocks that get no input with a gradient are trained, too."
)
REENTRANT = (
    "The reentrant variant does not check the recompute: a block that differs trains with wrong "
    "gradients, and weights get no gradient if no input of their block needs one."
)
CHECKPOINTED = (
    "Gradients stay the same if the block computes the same twice. A checkpoint keeps torch's "
    "random state, not Python's or NumPy's, and each recompute updates running statistics "
    "(BatchNorm) again."
)
