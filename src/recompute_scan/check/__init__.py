"""Thresholds and baselines for CI, and output formats."""

from recompute_scan.check.policy import Policy, Refusal, Ruling, judge

__all__ = ["Policy", "Refusal", "Ruling", "judge"]
