"""Thresholds as a person writes them, read into a policy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recompute_scan.check.policy import Policy
from recompute_scan.errors import UsageError

_WORDS = ("doubled", "wrong-gradients", "any", "none")
_CODE = re.compile(r"RS\d{3}")


def parse_thresholds(
    fail_on: str | None, max_recompute: float | None, costs: Sequence[str]
) -> Policy:
    """The policy that a person asked for; without any threshold, doubled checkpointing is refused.

    Args:
        fail_on: ``doubled``, ``wrong-gradients``, ``any``, ``none`` or codes, with commas between.
        max_recompute: Highest number of recomputes per backward to let through.
        costs: Highest costs in percent of the step, each for all (``5``) or one code (``RS005=2``).

    Raises:
        UsageError: One of them is no threshold (``E211``).
    """
    total: float | None = None
    by_code: dict[str, float] = {}
    for cost in costs:
        code, given, share = cost.rpartition("=")
        try:
            percent = float(share)
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100 or (given and not _CODE.fullmatch(code)):
            raise UsageError(
                "E211",
                f"--max-cost {cost} is no threshold.",
                hint="--max-cost 5 for 5 % of the step, --max-cost RS005=2 for one finding",
            )
        if given:
            by_code[code] = percent
        else:
            total = percent
    thresholds = max_recompute is not None or total is not None
    default = "none" if thresholds else "doubled"
    words = [word.strip() for word in (fail_on or default).split(",") if word.strip()]
    for word in words:
        if word not in _WORDS and not _CODE.fullmatch(word):
            raise UsageError(
                "E211",
                f"--fail-on {word} is not known.",
                hint=f"{', '.join(_WORDS)}, or codes such as RS001, separated by commas",
            )
    return Policy(
        doubled="doubled" in words,
        wrong_gradients="wrong-gradients" in words,
        any="any" in words,
        codes=frozenset(filter(_CODE.fullmatch, words)),
        max_recompute=max_recompute,
        max_cost=total,
        max_cost_of=by_code,
    )
