"""The rooms of the source, from the top down, for ``docs/design.md``."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = "recompute_scan"


def rooms() -> str:
    """A row of a table for each package, with its first line.

    The top is what has the longest way down by imports.
    """
    files = {_name(path): path for path in sorted((SOURCE / PACKAGE).rglob("*.py"))}
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in files.items()}
    below: dict[str, set[str]] = {}
    for name, tree in trees.items():
        used = {_room(other) for other in _imports(tree, set(files))} - {_room(name)}
        below.setdefault(_room(name), set()).update(used)

    @cache
    def depth(room: str) -> int:
        return 1 + max(map(depth, below.get(room, ())), default=0)

    packages = [n for n, path in files.items() if path.name == "__init__.py" and n != PACKAGE]
    packages.sort(key=lambda name: (-depth(_room(name)), name))
    rows = ["| package | content |", "| --- | --- |"]
    for name in packages:
        place = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        title = (ast.get_docstring(trees[name]) or "").partition("\n")[0].replace("``", "`")
        rows.append(f"| `{place}/` | {title} |")
    return "\n".join(rows) + "\n"


def _name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _imports(node: ast.AST, known: set[str]) -> set[str]:
    """Modules of the package that are imported anywhere in it, but for types alone."""
    found: set[str] = set()
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING":
            continue
        if isinstance(one, ast.ImportFrom) and one.module and not one.level:
            for alias in one.names:
                whole = f"{one.module}.{alias.name}"
                found |= {whole if whole in known else one.module} & known
        found |= _imports(one, known)
    return found
