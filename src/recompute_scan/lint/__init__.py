"""What scripts and configuration files switch on, read without running anything.

Files become facts (:mod:`python`, :mod:`settings`, :mod:`shell`), facts become findings
(:mod:`rules`), findings become text (:mod:`render`). Nothing that is read is imported.
"""

from recompute_scan.lint.engine import Report, lint

__all__ = ["Report", "lint"]
