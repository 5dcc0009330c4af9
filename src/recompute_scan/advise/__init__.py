"""What to change: the choice between checkpoints, in sentences and as a diff."""

from recompute_scan.advise.choose import (
    Switch,
    advise_removal,
    keep_and_drop,
    switch_of,
    take_out,
)
from recompute_scan.advise.setting import advise_fewer, advise_selective
from recompute_scan.advise.wording import RunFacts, mechanism_of, place, title_of
from recompute_scan.frameworks.known import find_mechanism

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
