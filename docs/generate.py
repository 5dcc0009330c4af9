"""Write the pages that follow from the code: the commands' help and the result's fields.

``python docs/generate.py`` writes them (``make fix`` does), and a test checks that they are true.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from recompute_scan.cli import cli
from recompute_scan.result import json_schema

DOCS = Path(__file__).parent
_WIDTH = 80

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


PAGES = {"commands.md": commands_page, "result-fields.md": fields_page}


if __name__ == "__main__":
    for page, write in PAGES.items():
        (DOCS / page).write_text(write(), encoding="utf-8")
