"""Static checks of scripts and configuration files.

Files become facts (:mod:`python`, :mod:`launches`). Facts become findings (:mod:`doubling`,
:mod:`launches`; :mod:`wrappers` where one checkpoint is met inside another). Findings become text
or a diff (:mod:`output`). Nothing that is read is imported.
"""

from recompute_scan.lint.engine import Report, lint

__all__ = ["Report", "lint"]
