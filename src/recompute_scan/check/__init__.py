"""Whether a result may pass: thresholds, what is accepted, and the answer in the forms of CI."""

from recompute_scan.check.policy import Policy, Refusal, Ruling, judge

__all__ = ["Policy", "Refusal", "Ruling", "judge"]
