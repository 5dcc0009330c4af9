"""Static checks of scripts and configuration files.

Files become facts (:mod:`python`, :mod:`settings`, :mod:`shell`), facts become findings
(:mod:`doubling`, :mod:`launches`; :mod:`nested` where :mod:`following` meets one checkpoint inside
another), findings become text or a diff (:mod:`lint_formats`). Nothing that is read is imported.
"""

from recompute_scan.lint.engine import Report, lint

__all__ = ["Report", "lint"]
