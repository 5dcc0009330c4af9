"""What it takes for equal and for right: losses, verdicts, and the error of a program."""

import re
from typing import Any

_LOSS = re.compile(
    r"(?:loss|accuracy)(?: train)?['\"]?\s*[:=|]?\s*['\"]?(-?\d+\.\d+(?:e-?\d+)?|nan)",
    re.IGNORECASE,
)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def last_line(output: str) -> str:
    """The last error of a program, or the last that it said."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in lines]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    # What torchrun says of its processes' errors comes last, and says less.
    errors = [line for line in errors if "ChildFailedError" not in line] or errors
    return _COLORS.sub("", (errors or lines or ["no output"])[-1])[:200]


def same_losses(plain: str, counting: str, ours: str) -> tuple[str, bool]:
    """What the losses say, and whether nothing speaks against us."""
    first, second, third = (
        _LOSS.findall(_COLORS.sub("", output)) for output in (plain, counting, ours)
    )
    if not first:
        return "none printed", True
    if first[-1:] != second[-1:]:
        return "differ from run to run without the tool", True
    # Ours prints its report behind those of the script; a progress bar shows some or others.
    compared = first if first == second else first[-1:]
    if third[: len(compared)] == compared or (len(compared) == 1 and first[-1] in third):
        return f"same {len(compared)}, last {first[-1]}", True
    return f"{first[-1]} without us, {third[-1:]} with us", False


def agrees(found: dict[str, Any], counted: dict[str, Any]) -> bool:
    """Whether the verdict is the one that the count asks for, and its number too."""
    most = counted["most"]
    if most == 0:
        return bool(found["verdict"] == "none")
    if most >= 1.5:
        per_backward = found["recompute_per_backward"]
        return bool(found["verdict"] == "doubled" and abs(per_backward - most) < 0.5)
    return found["verdict"] in ("partial", "full")
