"""Whether a result may pass: thresholds, what is accepted, and the answer in the forms of CI."""

from recompute_scan.check.policy import Outcome, Policy, Refusal, judge

__all__ = ["Outcome", "Policy", "Refusal", "judge"]
