"""The thresholds of `check`, and the baseline: a small file of accepted findings."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec
from msgspec import Struct, field

from recompute_scan.errors import InputError, UsageError, meant
from recompute_scan.files import decoded, document
from recompute_scan.result import DOUBLED, Checkpoint, Finding, Result

_SITE = re.compile(r"(.+):(\d{1,9})", re.DOTALL)
BASELINE_SCHEMA = "recompute-scan-baseline/1"


class Site(Struct, frozen=True):
    """A line of a file; the path as the run saw it, relative where it could be."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _parse_site(text: str | None) -> Site | None:
    """``file:line`` as a site, ``None`` for anything else."""
    found = _SITE.fullmatch(text or "")
    return Site(found[1], int(found[2])) if found and int(found[2]) else None


def site_of(finding: Finding, result: Result) -> Site | None:
    """The line to change, or the first that the evidence names; ``None`` where none is known."""
    if finding.fix is not None and finding.fix.removes is not None:
        site = _parse_site(finding.fix.removes.call_site)
        if site is not None:
            return site
    return next((site for c in _named(finding, result) if (site := _parse_site(c.call_site))), None)


def fingerprint(finding: Finding, result: Result) -> str:
    """The same for the same finding in a later run: 16 hex digits.

    Made of the code and of the mechanisms and files that the evidence names, without line
    numbers, counts and times, which change with every edit and every run.
    """
    parts = set()
    for checkpoint in _named(finding, result):
        site = _parse_site(checkpoint.call_site)
        file = site.file if site else ""
        # The folder of an absolute path differs from machine to machine.
        stable = PurePosixPath(file).name if file.startswith("/") else file
        parts.add(f"{checkpoint.mechanism}|{stable}")
    text = "\n".join([finding.code, *sorted(parts)])
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def _named(finding: Finding, result: Result) -> list[Checkpoint]:
    """The checkpoints with a call site in the finding's evidence, outermost first."""
    seen: dict[tuple[str | None, str | None], Checkpoint] = {}
    for region in result.regions:
        for checkpoint in region.checkpoints:
            site = checkpoint.call_site
            if site and any(line.endswith(f" {site}") for line in finding.evidence):
                seen.setdefault((checkpoint.mechanism, site), checkpoint)
    return list(seen.values())


class Accepted(Struct, frozen=True):
    """One accepted finding.

    Attributes:
        code: Its code.
        fingerprint: See :func:`recompute_scan.check.policy.fingerprint`.
        recompute_per_backward: Recomputes when it was accepted; more of them are news.
        title: The finding's title, for people who read the file.
        site: Its place, for people who read the file.
    """

    code: str
    fingerprint: str
    recompute_per_backward: float | None = None
    title: str = ""
    site: str | None = None


class Baseline(Struct, frozen=True):
    """The file."""

    accepted: tuple[Accepted, ...]
    schema: str = BASELINE_SCHEMA


def accepts(baseline: Sequence[Accepted], finding: Finding, result: Result) -> bool:
    """Whether the finding is known, and no worse than it was."""
    print_of = fingerprint(finding, result)
    runs = result.recompute_per_backward
    return any(
        known.code == finding.code
        and known.fingerprint == print_of
        and (
            known.recompute_per_backward is None
            or runs is None
            or runs <= known.recompute_per_backward
        )
        for known in baseline
    )


def baseline_json(result: Result) -> str:
    """A baseline that accepts all that was found, as JSON text."""
    accepted = tuple(
        Accepted(
            code=finding.code,
            fingerprint=fingerprint(finding, result),
            recompute_per_backward=result.recompute_per_backward,
            title=finding.title,
            site=str(site) if (site := site_of(finding, result)) else None,
        )
        for finding in result.findings
    )
    return document(Baseline(accepted)).decode()


def parse_baseline(data: bytes, name: str) -> tuple[Accepted, ...]:
    """The findings that the file accepts.

    Raises:
        InputError: It is not a baseline of this version (``E328``).
    """
    try:
        baseline = decoded(data, Baseline)
    except (UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise InputError("E328", f"{name} is not a baseline.", why=str(error)) from None
    if baseline.schema != BASELINE_SCHEMA:
        raise InputError(
            "E328", f"{name} is not a baseline.", why=f"its schema is {baseline.schema!r}"
        )
    return baseline.accepted


_WORDS = ("doubled", "wrong-gradients", "any", "none")


class Policy(Struct, frozen=True):
    """The findings and figures to refuse.

    Attributes:
        doubled: Refuse forward work that runs again twice or more.
        wrong_gradients: Refuse checkpointing that changes the trained model.
        any: Refuse every finding.
        codes: Refuse findings with these codes.
        max_recompute: Highest number of recomputes per backward to let through.
        max_cost: Highest share of the step to let recomputes waste, in percent.
        max_cost_of: The same for single findings, by code; one below its threshold passes.
    """

    doubled: bool = True
    wrong_gradients: bool = False
    any: bool = False
    codes: frozenset[str] = frozenset()
    max_recompute: float | None = None
    max_cost: float | None = None
    max_cost_of: Mapping[str, float] = field(default_factory=dict)


# Whoever asks this does not ask how often anything is recomputed.
_GRADIENTS_ALONE = Policy(doubled=False, wrong_gradients=True)


class Refusal(Struct, frozen=True):
    """One reason to refuse.

    Attributes:
        rule: The finding's code, or the option with the threshold that was passed.
        why: One sentence.
        finding: The finding, where it is one.
        site: The line to change, where it is known.
    """

    rule: str
    why: str
    finding: Finding | None = None
    site: Site | None = None


class Ruling(Struct, frozen=True):
    """The answer.

    Attributes:
        result: What was judged.
        refused: Reasons to refuse; empty when it passes.
        accepted: Reasons that the baseline accepts.
        undecided: The open questions, one sentence each.
        passed_over: Findings that training changes, which were not to be refused.
    """

    result: Result
    refused: tuple[Refusal, ...]
    accepted: tuple[Refusal, ...]
    undecided: tuple[str, ...]
    passed_over: tuple[Finding, ...] = ()

    @property
    def status(self) -> int:
        """Exit status: 1 refused, 4 undecided, 0 passed."""
        return 1 if self.refused else 4 if self.undecided else 0

    @property
    def word(self) -> str:
        """``refused``, ``undecided`` or ``passed``."""
        return {1: "refused", 4: "undecided"}.get(self.status, "passed")


def judge(result: Result, policy: Policy, baseline: tuple[Accepted, ...] = ()) -> Ruling:
    """Refusals, acceptances and doubts; see :class:`Policy`."""
    refused: list[Refusal] = []
    accepted: list[Refusal] = []
    for refusal in _refusals(result, policy):
        known = refusal.finding is not None and accepts(baseline, refusal.finding, result)
        (accepted if known else refused).append(refusal)
    passed_over = tuple(
        finding
        for finding in result.findings
        if finding.wrong_gradients
        and not _is_refused(finding, policy)
        and not accepts(baseline, finding, result)
    )
    doubts = tuple(_doubts(result, policy))
    return Ruling(result, tuple(refused), tuple(accepted), doubts, passed_over)


def _refusals(result: Result, policy: Policy) -> list[Refusal]:
    found = [
        Refusal(finding.code, finding.title, finding, site_of(finding, result))
        for finding in result.findings
        if _is_refused(finding, policy)
    ]
    doubled = policy.doubled or policy.any
    codes = {finding.code for finding in result.findings}
    if doubled and result.verdict == "doubled" and DOUBLED not in codes:
        found.append(Refusal("doubled", result.headline))
    runs = result.recompute_per_backward
    if policy.max_recompute is not None and runs is not None and not runs <= policy.max_recompute:
        found.append(
            Refusal(
                "max-recompute",
                f"Forward work runs again {runs:g} {'time' if runs == 1 else 'times'} in a "
                f"backward pass; {policy.max_recompute:g} is the most that is let through.",
            )
        )
    if policy.max_cost is not None and result.cost is not None:
        share = result.cost.saving_pct
        if share > policy.max_cost:
            found.append(
                Refusal(
                    "max-cost",
                    f"Redundant recomputes take {share:.1f} % of the step; {policy.max_cost:g} % "
                    "is the most that is let through.",
                )
            )
    return found


def _is_refused(finding: Finding, policy: Policy) -> bool:
    tolerated = policy.max_cost_of.get(finding.code)
    if tolerated is not None:
        return finding.saving_pct is not None and finding.saving_pct > tolerated
    return (
        policy.any
        or finding.code in policy.codes
        or (policy.doubled and finding.code == DOUBLED)
        or (policy.wrong_gradients and finding.wrong_gradients)
    )


def _doubts(result: Result, policy: Policy) -> list[str]:
    found = []
    if result.verdict == "inconclusive" and policy != _GRADIENTS_ALONE:
        found.append(result.reason or "There is no verdict.")
    if policy.wrong_gradients:
        found.extend(_not_compared(result))
    if policy.max_cost is not None and result.cost is None:
        found.append("The cost of the recomputes is not known.")
    asked = policy.codes | set(policy.max_cost_of)
    for rule in result.checked:
        if rule.status == "error" or (rule.code in asked and rule.status == "not-applicable"):
            found.append(f"{rule.code} could not be checked: {rule.why or 'no reason known'}")
    for finding in result.findings:
        if finding.code in policy.max_cost_of and finding.saving_pct is None:
            found.append(f"The cost of {finding.code} is not known.")
    return found


def _not_compared(result: Result) -> list[str]:
    """Why recomputes, or some of them, were not compared with their forward."""
    fidelity = result.fidelity
    if fidelity is None:
        return ["Only `recompute-scan run` compares recomputes with their forward."]
    if fidelity.untold:
        return [fidelity.untold]
    return list(dict.fromkeys(why for region in fidelity.regions for why in region.untold))


def parse_thresholds(
    fail_on: str | None, max_recompute: float | None, costs: Sequence[str], codes: Collection[str]
) -> Policy:
    """The policy that a person asked for; without any threshold, doubled checkpointing is refused.

    Args:
        fail_on: ``doubled``, ``wrong-gradients``, ``any``, ``none`` or codes, with commas between.
        max_recompute: Highest number of recomputes per backward to let through.
        costs: Highest costs in percent of the step, each for all (``5``) or one code (``RS005=2``).
        codes: Codes that findings can have; no others are taken.

    Raises:
        UsageError: One of them is no threshold (``E211``).
    """
    by_code: dict[str, float] = {}
    for cost in costs:
        code, given, share = cost.rpartition("=")
        try:
            percent = float(share)
        except ValueError:
            percent = -1.0
        unknown = given and code not in codes
        if unknown or not 0 <= percent <= 100:
            why = f"`check` has no finding {code!r}" if unknown else None
            hint = "--max-cost 5 for 5 % of the step, --max-cost RS005=2 for one finding"
            hint = meant(code, codes if unknown else ()) + hint
            raise UsageError("E211", f"--max-cost {cost} is no threshold.", why=why, hint=hint)
        by_code[code] = percent
    total = by_code.pop("", None)
    if max_recompute is not None and not 0 <= max_recompute < math.inf:  # no nan is
        raise UsageError("E211", f"--max-recompute {max_recompute} is no threshold.")
    thresholds = max_recompute is not None or total is not None
    default = "none" if thresholds else "doubled"
    asked = default if fail_on is None else fail_on
    words = [word.strip() for word in asked.split(",") if word.strip()]
    if not words:
        raise UsageError("E211", "--fail-on names nothing.", hint=f"one of {', '.join(_WORDS)}")
    for word in words:
        if word not in _WORDS and word not in codes:
            what, why = f"--fail-on {word} is not known.", f"`check` has no finding {word!r}"
            hint = f"{', '.join(_WORDS)}, or codes such as RS001, separated by commas"
            raise UsageError("E211", what, why=why, hint=meant(word, (*_WORDS, *codes)) + hint)
    if "none" in words and len(words) > 1:
        what, why = f"--fail-on {asked} contradicts itself.", "none is there, and something else"
        raise UsageError("E211", what, why=why, hint="leave out none, or all else")
    return Policy(
        doubled="doubled" in words,
        wrong_gradients="wrong-gradients" in words,
        any="any" in words,
        codes=frozenset(words).difference(_WORDS),
        max_recompute=max_recompute,
        max_cost=total,
        max_cost_of=by_code,
    )
