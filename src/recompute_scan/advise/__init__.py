"""What to change: one file a framework, and the choice between two of them."""

from recompute_scan.advise.choose import advise_removal
from recompute_scan.advise.registry import title_of

__all__ = ["advise_removal", "title_of"]
