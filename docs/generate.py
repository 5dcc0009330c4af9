"""Write the pages that follow from the code: the commands' help and the result's fields.

``python docs/generate.py`` writes them (``make fix`` does), and a test checks that they are true.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from recompute_scan.cli import cli
from recompute_scan.diagnose.classify import how_checked
from recompute_scan.diagnose.logs import lines_of, read_log
from recompute_scan.diagnose.registry import HANGS, SIGNATURES, names
from recompute_scan.diagnose.signature import Signature
from recompute_scan.result import json_schema

DOCS = Path(__file__).parent
LOGS = DOCS.parent / "tests" / "diagnose" / "corpus" / "known"
_WIDTH = 80
_EXAMPLE_LINES = 7
_EXAMPLE_WIDTH = 160

_COMMANDS = """\
# Commands

What `--help` prints, at 80 columns. This page is generated: `python docs/generate.py`.
"""

_FIELDS = """\
# The result's fields

What `analyze --format json` prints and `run` writes as `result.json`, class by class; the JSON
Schema itself is `recompute_scan/result.schema.json` in the package. Every field is always there;
what is not known is `null`, never 0. This page is generated: `python docs/generate.py`.
"""


_DIAGNOSES = """\
# Diagnoses

When the script raises, exits with a failure or hangs, `recompute-scan run` still writes its report:
the exception and where it was, the rank that failed first, memory, models and their checkpoints at
that moment, and the cause where it is one of those below. The traceback is printed as Python prints
it, and the exit status passes through. `recompute-scan explain LOGFILE` (or `-`) looks for the same
causes in a log; `recompute-scan explain RS101` prints a page. This page is generated:
`python docs/generate.py`.

## How a failure is recognised

By the exception's class and message, and where these could mean several things by its frames, by
the shapes in the message, or by a warning beside it. A failure that fits none gets no diagnosis.
Of several ranks, the first failure counts that does not follow from another rank's death; one
rank's traceback outranks every line of NCCL's watchdog. A log is read as a stream: 100 MB take
2.9 s of one processor and 19 MiB (`recompute-scan explain` on a log of 1.2 million lines).

## Hangs

A thread in every rank looks at the main thread. Progress is an optimizer step or another place in
its Python code; in a single process, also the use of the processor. When no rank has made any for
`--timeout` seconds (600; 0 turns it off), each rank's stacks are taken, the report names where each
of them stands, and the run ends with status 124. A rank that works while the others wait for it
keeps the run alive. What was recorded until then is kept. Not seen: a process whose main thread
holds Python's lock for good, and one that waits busily in a single process.

## How this was checked

`make diagnoses` runs every script that fails (`tests/diagnose/scripts`) under `recompute-scan run`
and prints the code expected and found. RS201 needs lightning 2.2.1 or older; it was run with 2.2.1
in an environment of its own, and its log is among the logs. RS101's log is that of transformers
4.57.3; the script in the tests makes the same error with a small model of our own. The logs
(`tests/diagnose/corpus`) hold one or more for each known failure and 56 others, near misses among
them; those that could not be made to happen were written in the shape of public reports.

| code | what happened | how it was checked |
| --- | --- | --- |
"""

_WITHOUT_A_SIGN = """\

Known, and not recognised because nothing tells them from others: memory that grows with reentrant
checkpoints under FSDP2 until it runs out
([pytorch 169349](https://github.com/pytorch/pytorch/issues/169349); RS120 says so), and saving a
compiled FSDP model through its wrapper
([pytorch 119980](https://github.com/pytorch/pytorch/issues/119980); save the inner module).
"""

_FAILURE = """\
A failure that `recompute-scan run` recognises when the script raises or hangs, and
`recompute-scan explain` in a log or a pasted traceback. Generated: `python docs/generate.py`."""


def commands_page() -> str:
    """The help of every command, as Markdown."""
    asked = [[], *([name] for name in sorted(cli.commands))]
    return _COMMANDS + "".join(map(_help, asked))


def _help(command: list[str]) -> str:
    printed = CliRunner(env={"NO_COLOR": "1"}).invoke(
        cli, [*command, "--help"], prog_name="recompute-scan", terminal_width=_WIDTH
    )
    title = " ".join(["recompute-scan", *command])
    return f"\n## {title}\n\n```text\n{printed.output.rstrip()}\n```\n"


def fields_page() -> str:
    """Every class of the result with its fields and their types, as Markdown."""
    definitions = json_schema()["$defs"]
    first = ["Result", *sorted(name for name in definitions if name != "Result")]
    return _FIELDS + "".join(_section(name, definitions[name]) for name in first)


def _section(name: str, definition: Mapping[str, Any]) -> str:
    told = definition.get("description", "").split("\n\n")[0]
    rows = [
        f"| `{field}` | {_type(schema)} |\n" for field, schema in definition["properties"].items()
    ]
    about = f"{' '.join(told.split())}\n\n" if told else ""
    return f"\n## {name}\n\n{about}| field | type |\n| --- | --- |\n{''.join(rows)}"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(sorted(map(_type, schema["anyOf"]), key="`null`".__eq__))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        return f"object of {_type(schema.get('additionalProperties') or {})}"
    return f"`{kind}`"


def diagnoses_page() -> str:
    """Every known failure with how it was checked, as Markdown."""
    rows = [
        f"| [{one.code}](findings/{one.code}.md) {one.name} | {one.title} | {_checked(one)} |\n"
        for one in sorted((*SIGNATURES, *HANGS), key=lambda one: one.code)
    ]
    return _DIAGNOSES + "".join(rows) + _WITHOUT_A_SIGN


def _checked(one: Signature) -> str:
    return "a script fails so, on CPU" if one.checked == "reproduced" else "by the message only"


def failure_pages() -> dict[str, str]:
    """The page of every known failure, by its name below ``docs``."""
    known = [*SIGNATURES, *HANGS]
    return {
        f"findings/{code}.md": _failure_page([one for one in known if one.code == code])
        for code in names()
    }


def _failure_page(causes: list[Signature]) -> str:
    first = causes[-1]  # the general one stands last
    parts = [f"# {first.code} {first.name}", _FAILURE, *map(_cause, causes)]
    return "\n\n".join(parts) + "\n"


def _cause(one: Signature) -> str:
    parts = [f"## {one.title}"]
    if (shown := _example(one)) is not None:
        parts.append(f"```text\n{shown}\n```")
    parts += [_wrapped(one.cause), _wrapped(f"**What to change.** {one.fix}")]
    if one.keep:
        parts.append(_wrapped(f"**Keep** {one.keep}. **Remove** {one.remove}."))
    if one.more:
        parts.append(one.more.strip())
    parts.append(_wrapped(f"**Versions.** {one.versions}"))
    parts.append(_wrapped(f"**How it was checked.** {how_checked(one)}"))
    links = [f"<{address}>" for address in one.sources]
    parts.append("**Read more.**\n\n" + "\n".join(f"- {link}" for link in links))
    return "\n\n".join(parts)


def _example(one: Signature) -> str | None:
    """What a log of this failure says, from the tests' logs."""
    path = LOGS / f"{one.code}-{one.cause_name}.log"
    if not path.exists():
        return None
    with path.open("rb") as file:
        log = read_log(lines_of(file))
    lines = [line for _, line in log.lines if one.message.search(line)]
    said = [
        f"{raised.type}: {raised.message}"
        for failure in log.failures
        for raised in failure.errors
        if one.message.search(raised.message) and not log.timeouts
    ]
    if log.timeouts:
        text = path.read_bytes().decode().splitlines()
        said = ["\n".join(text[timeout.line - 1] for timeout in log.timeouts)]
    text_lines = [line[:_EXAMPLE_WIDTH] for line in (said or lines)[0].splitlines()]
    return "\n".join(text_lines[:_EXAMPLE_LINES]).rstrip()


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


PAGES = {
    "commands.md": commands_page,
    "diagnoses.md": diagnoses_page,
    "result-fields.md": fields_page,
} | {name: (lambda text=text: text) for name, text in failure_pages().items()}


if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write(), encoding="utf-8")
