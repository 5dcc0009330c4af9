"""All frameworks: every mechanism, most specific first, and the facts of each framework."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from functools import cache, lru_cache
from importlib import import_module
from typing import Literal

from recompute_scan.frameworks import base, pytorch
from recompute_scan.frameworks.base import Flaw, Mechanism, Setting, SettingSwitch, Values
from recompute_scan.frameworks.detect import Signature

_WILDCARD = re.compile(r"[*?]")
# Where transformers keeps code that came with a model: anybody's.
_CODE_OF_MODELS = "transformers_modules"

# Modules of this folder. The first mechanism that fits a place counts, so modules that name their
# places more narrowly come first.
_FRAMEWORKS = ("trainers", "huggingface", "parallel", "pytorch")
_MODULES = tuple(vars(import_module(f"{__package__}.{name}")) for name in _FRAMEWORKS)
MECHANISMS: tuple[Mechanism, ...] = tuple(m for module in _MODULES for m in module["MECHANISMS"])
# Beginnings of commands that start training: ``torchrun``, ``accelerate launch``.
COMMANDS = tuple(dict.fromkeys(command for m in MECHANISMS for command in m.commands))
# Distributions with versions that bear on a mechanism.
PACKAGES = tuple(dict.fromkeys(package for m in MECHANISMS for package in m.packages))
# Modules of all frameworks that start or serve training: ``torch.distributed``.
LAUNCHERS = tuple(dict.fromkeys(module for m in MECHANISMS for module in m.launchers))
# Classes that are around a model to train it in parallel, with what each is called.
ENGINES = dict(engine for m in MECHANISMS for engine in m.engines)
# Pages that findings link to; each failure has one more.
PAGES = frozenset((base.SELECTIVE_DOCS, base.SHARDED_DOCS, *(m.docs for m in MECHANISMS)))


def find_mechanism(name: str | None) -> Mechanism | None:
    """The mechanism of that name, ``None`` for one that is not known."""
    return next((mechanism for mechanism in MECHANISMS if mechanism.name == name), None)


@lru_cache  # asked of every checkpoint call while steps are timed, in few different ways
def recognise(
    asking: str, switching: tuple[str, ...] = (), *, selective: bool = False, own: bool = False
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
    """The title of the mechanism of that name; ``None`` for one that is not known."""
    found = find_mechanism(name)
    return found.title if found else None


def flaws(values: Values) -> Iterator[Flaw]:
    """Mistakes in these settings alone, as each framework reads its settings."""
    for module in _MODULES:
        yield from module["flaws"](values) if "flaws" in module else ()


def switched_on(path: tuple[str, ...], setting: Setting) -> Iterator[SettingSwitch]:
    """The checkpoints that one setting switches on, by the frameworks that read it."""
    for module in _MODULES:
        yield from module["switched_on"](path, setting) if "switched_on" in module else ()


def signatures() -> Iterator[Signature]:
    """Failures of one framework alone, made when they are asked for: few runs fail."""
    for module in _MODULES:
        yield from module["signatures"]() if "signatures" in module else ()


def calls_in(script: str) -> frozenset[str]:
    """Words in a script's text that show calls of a framework's functions."""
    return frozenset(words for m in MECHANISMS for words in m.calls if words in script)


def either(field: Literal["backward", "sharding", "gathering", "stepping"]) -> str:
    """One pattern for this field of all mechanisms."""
    return "|".join(filter(None, (getattr(m, field) for m in MECHANISMS)))


def import_names() -> frozenset[str]:
    """First parts of the paths of all known frameworks: ``transformers``, ``megatron``."""
    return frozenset(_beginnings("/") - {"", _CODE_OF_MODELS})


def _beginnings(end: str) -> set[str]:
    """The places of all mechanisms up to this character, each up to its first wildcard."""
    places = (place for m in MECHANISMS for place in (*m.asks, *m.switched_by))
    return {_WILDCARD.split(place.partition(end)[0])[0] for place in places}


@cache
def framework_files(package: str) -> tuple[str, ...]:
    """Files and folders that only the framework of this name has, and no other package called so.

    They are the beginnings, without wildcards, of the places that its mechanisms name; empty where
    no mechanism belongs to that package.
    """
    return tuple(sorted(p for p in _beginnings(":") if p.startswith(f"{package}/")))


def matches(patterns: tuple[str, ...], places: Iterable[str]) -> bool:
    """Does any place fit any pattern? A path may have more folders in front of the pattern's."""
    return any(_compiled(pattern).fullmatch(place) for place in places for pattern in patterns)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?:.*/)?(?:{translate(pattern)})")
