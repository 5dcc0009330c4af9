"""Advice: the checkpoint to keep, in sentences and as a diff."""

from recompute_scan.advise.choice import (
    RunFacts,
    Switch,
    advise_removal,
    keep_and_drop,
    mechanism_of,
    place,
    switch_of,
    take_out,
    title_of,
)
from recompute_scan.advise.settings import advise_fewer, advise_selective
from recompute_scan.frameworks.registry import find_mechanism

__all__ = [
    "RunFacts",
    "Switch",
    "advise_fewer",
    "advise_removal",
    "advise_selective",
    "find_mechanism",
    "keep_and_drop",
    "mechanism_of",
    "place",
    "switch_of",
    "take_out",
    "title_of",
]
