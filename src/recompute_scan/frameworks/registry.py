"""What is known of all frameworks: every mechanism, most specific first, and their other facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import cache, lru_cache
from importlib import import_module
from typing import Literal

from recompute_scan.frameworks import pytorch
from recompute_scan.frameworks.base import Flaw, Mechanism, Setting, SettingSwitch, Values
from recompute_scan.frameworks.detect import Signature

_WILDCARD = re.compile(r"[*?]")
# Where transformers keeps code that came with a model: anybody's.
_CODE_OF_MODELS = "transformers_modules"

# Modules of this folder, in the order in which they are asked; the first that fits counts.
_FRAMEWORKS = (
    "unsloth",
    "llamafactory",
    "axolotl",
    "peft",
    "trl",
    "nemo",
    "torchtitan",
    "torchtune",
    "composer",
    "lightning",
    "huggingface",
    "accelerate",
    "megatron",
    "deepspeed",
    "transformer_engine",
    "fairscale",
    "timm",
    "diffusers",
    "pytorch",
)


_MODULES = tuple(vars(import_module(f"{__package__}.{name}")) for name in _FRAMEWORKS)

# Of each module its ``MECHANISMS``, or the one ``MECHANISM`` that it has.
MECHANISMS: tuple[Mechanism, ...] = tuple(
    mechanism
    for module in _MODULES
    for mechanism in module.get("MECHANISMS") or (module["MECHANISM"],)
)


def find_mechanism(name: str | None) -> Mechanism | None:
    """The mechanism of that name, ``None`` for one that is not known."""
    return next((mechanism for mechanism in MECHANISMS if mechanism.name == name), None)


@lru_cache  # asked of every checkpoint call while steps are timed, in few different ways
def recognise(
    asking: str,
    switching: tuple[str, ...] = (),
    *,
    selective: bool = False,
    own: bool = False,
) -> Mechanism:
    """The mechanism behind a checkpoint call.

    Args:
        asking: Place (``path:function``) of the frame that called the checkpoint function.
        switching: Places of the stack on which checkpointing was switched on, where known.
        selective: Whether the call has a ``context_fn``.
        own: Whether an autograd function checkpoints that is not torch's.
    """
    for mechanism in MECHANISMS:
        if mechanism.asks == pytorch.ANYWHERE and own:
            return pytorch.OWN
        if (
            matches(mechanism.asks, (asking,))
            and (not mechanism.switched_by or matches(mechanism.switched_by, switching))
            and mechanism.selective in (None, selective)
        ):
            return mechanism
    return pytorch.DIRECT


def find_title(name: str | None) -> str | None:
    """What a person calls the mechanism of that name; ``None`` for one that is not known."""
    found = find_mechanism(name)
    return found.title if found else None


def flaws(values: Values) -> Iterator[Flaw]:
    """What is wrong with these settings by themselves, as each framework reads its own."""
    for module in _MODULES:
        if "flaws" in module:
            yield from module["flaws"](values)


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """What one setting switches on, by the frameworks that read it."""
    for module in _MODULES:
        if "switched_on" in module:
            yield from module["switched_on"](path, setting)


def signatures() -> Iterator[Signature]:
    """Failures that are a framework's own, made when they are asked for: few runs fail."""
    for module in _MODULES:
        if "signatures" in module:
            yield from module["signatures"]()


def calls_in(script: str) -> frozenset[str]:
    """What in a script's text shows that it calls functions of frameworks."""
    return frozenset(words for m in MECHANISMS for words in m.calls if words in script)


def commands() -> tuple[str, ...]:
    """What begins a command that starts training: ``torchrun``, ``accelerate launch``."""
    return tuple(dict.fromkeys(command for m in MECHANISMS for command in m.commands))


def either(field: Literal["backward", "sharding", "gathering", "stepping"]) -> str:
    """One pattern for what any mechanism has in this field."""
    return "|".join(filter(None, (getattr(m, field) for m in MECHANISMS)))


def packages() -> tuple[str, ...]:
    """Distributions whose versions bear on a mechanism."""
    return tuple(dict.fromkeys(package for m in MECHANISMS for package in m.packages))


def launchers() -> tuple[str, ...]:
    """Modules of all frameworks that start or serve training: ``torch.distributed``."""
    return tuple(dict.fromkeys(module for m in MECHANISMS for module in m.launchers))


def engines() -> dict[str, str]:
    """Classes that are around a model to train it in parallel, with what each is called."""
    return dict(engine for m in MECHANISMS for engine in m.engines)


def import_names() -> frozenset[str]:
    """First parts of the paths of all known frameworks: ``transformers``, ``megatron``."""
    places = (place for m in MECHANISMS for place in (*m.asks, *m.switched_by))
    firsts = {_WILDCARD.split(place.partition("/")[0])[0] for place in places}
    return frozenset(firsts - {"", _CODE_OF_MODELS})


@cache
def framework_files(package: str) -> tuple[str, ...]:
    """Files and folders that tell the framework of this name from another package called so.

    They are the beginnings, without wildcards, of the places that its mechanisms name; none where
    no mechanism is of that package.
    """
    places = (place for m in MECHANISMS for place in (*m.asks, *m.switched_by))
    fixed = {_WILDCARD.split(place.partition(":")[0])[0] for place in places}
    return tuple(
        sorted(path for path in fixed if path.partition("/")[0] == package and "/" in path)
    )


def matches(patterns: tuple[str, ...], places: Iterable[str]) -> bool:
    """Does any place fit any pattern? A path may have more folders in front of the pattern's."""
    return any(
        part in place and _compiled(pattern).fullmatch(place)
        for place in places
        for pattern, part in zip(patterns, map(_longest_part, patterns), strict=True)
    )


@cache
def _longest_part(pattern: str) -> str:
    """What every place that fits has in it; most fit none, which this tells at once."""
    return max(_WILDCARD.split(pattern), key=len)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?:.*/)?(?:{translate(pattern)})")
