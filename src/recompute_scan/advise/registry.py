"""Every known mechanism, most specific first."""

from recompute_scan.advise import fsdp, huggingface, pytorch
from recompute_scan.advise.mechanism import Mechanism

MECHANISMS = (
    fsdp.MECHANISM,
    huggingface.MECHANISM,
    pytorch.COMPOSABLE,
    pytorch.SEQUENTIAL,
    pytorch.DIRECT,
)


def find_mechanism(name: str | None) -> Mechanism | None:
    """The mechanism of that name, ``None`` for one that is not known."""
    return next((mechanism for mechanism in MECHANISMS if mechanism.name == name), None)


def title_of(name: str | None) -> str:
    """What a person calls the mechanism; says so when it is not known."""
    mechanism = find_mechanism(name)
    return mechanism.title if mechanism else (name or "a checkpoint of unknown origin")
