"""An archive that is safe to publish: cleaned trace, result, report, bug report."""

from recompute_scan.bundle.pack import GITHUB_LIMIT, Archive, pack

__all__ = ["GITHUB_LIMIT", "Archive", "pack"]
