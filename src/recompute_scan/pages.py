"""The pages of the findings and of the messages.

A checkout has them in ``docs/``, an installed package in ``recompute_scan/docs/``, as the same
files. The pages of failures are written from here (``docs/generate.py``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES, how_checked
from recompute_scan.frameworks.detect import Signature

_HEAD = """\
A failure that `recompute-scan run` recognises when the script raises or hangs, and
`recompute-scan explain` in a log or a pasted traceback. Generated: `python docs/generate.py`."""
_UNTOUCHED = "The fix touches no checkpoint's variant, random state, check or buffers."


def page(code: str) -> str | None:
    """The page of the finding with this code, as Markdown; ``None`` where there is none."""
    return _pages().get(code.upper())


def titles() -> dict[str, str]:
    """The name of every finding by its code, in order of the codes."""
    return {
        code: text.partition("\n")[0][len("# RS000 ") :].strip() for code, text in _pages().items()
    }


@cache
def _pages() -> dict[str, str]:
    paths = sorted((_docs() / "findings").glob("RS*.md"))
    return {path.stem: path.read_text(encoding="utf-8").rstrip("\n") + "\n" for path in paths}


def _docs() -> Path:
    """The folder of the pages, in an installed package or in a checkout."""
    here = Path(__file__).parent
    installed = here / "docs"
    return installed if installed.is_dir() else here.parents[1] / "docs"


def message(code: str) -> str | None:
    """What the documentation says of an error, as Markdown; ``None`` where there is none."""
    return messages().get(code.upper())


def messages() -> dict[str, str]:
    """What the documentation says of every error, by its code, heading first."""
    path = _docs() / "messages.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = re.split(r"^(?=#{2,3} )", page, flags=re.MULTILINE)
    return {part[4:8]: part for part in parts if part.startswith("### E")}


def causes_of(code: str) -> list[Signature]:
    """The causes of one failure, in the order of its page: the general one stands last."""
    return [one for one in (*SIGNATURES, *IN_RUNS, *HANGS) if one.code == code]


def failure_page(code: str, examples: Sequence[str | None]) -> str:
    """The page as Markdown; for each cause what a log says, where one is known to."""
    causes = causes_of(code)
    parts = [f"# {code} {causes[-1].name}", _HEAD, *map(_cause, causes, examples)]
    return "\n\n".join(parts) + "\n"


def _cause(one: Signature, example: str | None) -> str:
    symptom = (
        "The log says:" if example else f"{one.title}, as the log or the place of the ranks shows."
    )
    parts = [f"## {one.title}", "### Symptom", _wrapped(symptom)]
    if example is not None:
        parts.append(f"```text\n{example}\n```")
    parts += ["### Cause", _wrapped(one.cause), "### Fix", _wrapped(one.fix)]
    if one.more:
        parts.append(one.more.strip())
    parts += ["### Before and after", *map(_wrapped, _before_and_after(one)), "### Sources"]
    parts.append(_wrapped(f"**Versions.** {one.versions}"))
    parts.append(_wrapped(f"**How it was checked.** {how_checked(one)}"))
    parts.append("\n".join(f"- <{address}>" for address in one.sources))
    return "\n\n".join(parts)


def _before_and_after(one: Signature) -> list[str]:
    """What goes and what stays, and what that does to gradients."""
    changed = ["**Before.** The run fails as above."] if one.severity == "error" else []
    found = [f"**Remove** {one.remove}. **Keep** {one.keep}."] if one.keep else []
    return [*changed, *found, f"**After.** {one.gradients or _UNTOUCHED}"]


def _wrapped(text: str) -> str:
    marked = text if "`" in text else " ".join(map(_as_code, text.split(" ")))
    return "\n".join(textwrap.wrap(marked, 100, break_long_words=False, break_on_hyphens=False))


def _as_code(word: str) -> str:
    """A word that is code (a name with an underscore, a call, an assignment) marked as such."""
    if not re.search(r"_|\(\)|=", word) or word.startswith("http"):
        return word
    before = "(" if word.startswith("(") else ""
    core = word.removeprefix("(").rstrip(".,;:").removesuffix("'s")
    if core.count(")") > core.count("("):
        core = core[:-1]
    return f"{before}`{core}`{word[len(before) + len(core) :]}"
