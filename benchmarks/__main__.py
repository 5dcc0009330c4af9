"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME`` runs one."""

import ast
import importlib
import sys

import click

from benchmarks._frame import HERE, call, saved

# A module or package without an underscore before its name is one, and its `main` the command.
_FILES = {
    path.parent.name if path.name == "__init__.py" else path.stem: path
    for path in (*HERE.glob("[!_]*.py"), *HERE.glob("*/__init__.py"))
}
NAMES = sorted(name.replace("_", "-") for name in _FILES)


class Benchmarks(click.Group):
    """All of this folder; each is imported when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return NAMES

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NAMES:
            return None
        command: click.Command = importlib.import_module(f"benchmarks.{_module(cmd_name)}").main
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first line of each module, read without importing it."""
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, first_line(name)) for name in NAMES], col_max=18)


def first_line(name: str) -> str:
    """What a benchmark measures, by its module's first line."""
    text = _FILES[_module(name)].read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def _module(name: str) -> str:
    return name.replace("-", "_")


@click.group(cls=Benchmarks, context_settings={"max_content_width": 100})
@click.option("--save", metavar="FILE", help="Also write what is printed to benchmarks/results.")
@click.pass_context
def main(ctx: click.Context, save: str | None) -> None:
    """Measure what the documentation says in figures; `NAME --help` says how."""
    ctx.with_resource(saved(save))


if __name__ == "__main__":
    sys.exit(call(main))
