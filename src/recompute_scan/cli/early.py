"""Environment variables that a script sets before it imports torch, which reads some of them then.

Under ``run`` torch is imported before the script begins, so that ``os.environ["OMP_NUM_THREADS"] =
"1"`` at its top would come too late: other numbers of threads add floats up in another order.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from recompute_scan.files import content

_LONGEST = 1 << 22


def set_early(script: Path) -> None:
    """Set what the script's first lines set, in the order in which they do.

    These are the lines up to the first that is neither an import from the standard library nor a
    constant nor a variable of the environment that is given one: nothing can have looked at the
    environment in between. Others are left to the script, and so is a script that cannot be read.
    """
    with suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        text = content(script, _LONGEST)
        with warnings.catch_warnings():  # the script's own come when it runs
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        for name, value, only_if_missing in _settings(tree.body):
            if not (only_if_missing and name in os.environ):
                os.environ[name] = value


def _settings(body: list[ast.stmt]) -> Iterator[tuple[str, str, bool]]:
    """Name, value, and whether it is set only where it is missing."""
    for statement in body:
        match statement:
            case ast.Import(names=names) if all(_is_standard(one.name, one) for one in names):
                continue
            case ast.ImportFrom(module=str(module), level=0) if _is_standard(module):
                continue
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant()) if name != "os":
                continue
            case ast.Assign(
                targets=[ast.Subscript(value=place, slice=ast.Constant(value=str(name)))],
                value=ast.Constant(value=str(value)),
            ) if ast.unparse(place) == "os.environ":
                yield name, value, False
            case ast.Expr(
                value=ast.Call(
                    func=function,
                    args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
                    keywords=[],
                )
            ) if ast.unparse(function) == "os.environ.setdefault":
                yield name, value, True
            case _:
                return


def _is_standard(module: str, alias: ast.alias | None = None) -> bool:
    """Is it of the standard library, and does it leave the name ``os`` alone?"""
    renamed = alias is not None and alias.asname == "os" and module != "os"
    return module.partition(".")[0] in sys.stdlib_module_names and not renamed
