"""One archive that a stranger may have: the result, the page, a bug report, and the proof."""

from recompute_scan.bundle.pack import GITHUB_LIMIT, Archive, pack

__all__ = ["GITHUB_LIMIT", "Archive", "pack"]
