"""How the source is built: sizes, names, circles, and how often an analysis works out one fact.

    python benchmarks/house.py            the table
    python benchmarks/house.py --before REVISION   beside what an earlier revision was

Everything is counted in the source text but the last rows, for which one trace of ``traces/`` is
analysed under Python's own profiler. Of an earlier revision only the source is read.
"""

from __future__ import annotations

import argparse
import ast
import cProfile
import io
import pstats
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recompute_scan.analysis.pipeline import analyse

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "recompute_scan"
TRACE = ROOT / "traces" / "doubled_llama_fsdp"
# What people add, by the recipe's heading; tests follow the recipes word by word.
EXTENSIONS = ("A finding", "A framework", "A report section", "A trace source", "A launcher")
# A recipe's own module, and the lists and functions of others that get a line.
_NEW = re.compile(r"^1\. `(src/recompute_scan/[^`]+)`", re.MULTILINE)
_LISTED = re.compile(r"`(?:_[A-Z_]+|SECTION|load)`\s+(?:of|in)\s+`([^`]+\.py)`")
# What is known of each belongs in its own module; ``known`` lists them.
FRAMEWORKS = (
    *("deepspeed", "megatron", "fairscale", "unsloth", "torchtitan", "torchtune", "nemo"),
    *("composer", "diffusers", "timm", "peft", "trl", "accelerate", "lightning", "transformers"),
)
_ADDRESS = re.compile(r"https?://\S+")
# What is worked out from a trace, by the functions that do it: each once is enough.
FACTS = (
    *("load", "study", "nest", "find_collectives", "_outermost", "simulate", "price"),
    *("list_regions", "find_families", "split_phases"),
)


@dataclass(frozen=True)
class Module:
    """One module of the source.

    Attributes:
        name: With the package's: ``recompute_scan.trace.store``; a package's own ``__init__`` has
            the package's name.
        package: Whether it is a package's ``__init__``.
        lines: How many.
        words: Its code's names and texts, in lower case: no comment, docstring or address.
        title: First line of its docstring; empty where there is none.
        names: Functions, classes and variables at its top level.
        classes: The classes among them.
        imports: Modules of the same package that are imported anywhere in it, but for types alone.
        hidden: Those that are imported by their name in a string.
    """

    name: str
    package: bool
    lines: int
    words: str
    title: str
    names: tuple[str, ...]
    classes: tuple[str, ...]
    imports: frozenset[str]
    hidden: frozenset[str]


def read_house(source: Path = ROOT / "src") -> dict[str, Module]:
    """Every module below the folder, by its name."""
    files = sorted((source / PACKAGE).rglob("*.py"))
    known = {_name(path, source) for path in files}
    return {_name(path, source): _module(path, source, known) for path in files}


def circles(house: dict[str, Module]) -> list[tuple[str, ...]]:
    """Modules that import each other, round in a circle: each such group, sorted."""
    reached = {name: _reached(name, house) for name in house}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in house
        if name in reached[name]
    }
    return sorted(groups)


def alike(names: Iterator[str]) -> list[str]:
    """Those that occur more than once."""
    return sorted(name for name, often in Counter(names).items() if often > 1)


def rooms(house: dict[str, Module]) -> str:
    """The house for a person, from the top down: one row of a table for each room, and for each
    module that has none, with its first line.
    """
    depth = _depths(house)
    packages = [name for name, module in house.items() if module.package and name != PACKAGE]
    alone = [name for name, module in house.items() if name.count(".") == 1 and not module.package]
    packages.sort(key=lambda name: (-depth[_room(name)], name))
    alone.sort(key=lambda name: (-depth[name], name))
    rows = ["| room | what it holds |", "| --- | --- |"]
    for name in (*packages, *alone):
        place = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        place += "/" if house[name].package else ".py"
        rows.append(f"| `{place}` | {house[name].title.replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _depths(house: dict[str, Module]) -> dict[str, int]:
    """For each room, and each module beside them: the longest way down by imports."""
    below: dict[str, set[str]] = {}
    for name, module in house.items():
        below.setdefault(_room(name), set()).update(
            room for other in module.imports if (room := _room(other)) != _room(name)
        )
    depths: dict[str, int] = {}

    def depth(room: str) -> int:
        if room not in depths:
            depths[room] = 0
            depths[room] = 1 + max((depth(other) for other in below.get(room, ())), default=0)
        return depths[room]

    return {room: depth(room) for room in below}


def table(house: dict[str, Module]) -> dict[str, str]:
    """What there is to count in the source."""
    modules = [module for module in house.values() if not module.package]
    largest = max(modules, key=lambda module: module.lines)
    users = Counter(other for module in house.values() for other in module.imports)
    return {
        "modules": str(len(modules)),
        "lines": f"{sum(module.lines for module in house.values()):,}",
        "median lines": f"{median(module.lines for module in modules):g}",
        "largest": f"{largest.lines} ({largest.name.removeprefix(PACKAGE + '.')})",
        "over 300 lines": str(sum(module.lines > 300 for module in modules)),
        "public top-level names": f"{sum(map(_public, house.values())):,}",
        "modules of one name": _said(alike(m.name.rpartition(".")[2] for m in modules)),
        "classes of one name": _said(alike(name for m in modules for name in m.classes)),
        "import circles": str(len(circles(house))),
        "imports hidden in a string": _said(sorted(set().union(*(m.hidden for m in modules)))),
        "modules that one other imports": str(sum(users[module.name] == 1 for module in modules)),
        **{
            f"modules that name {framework}": str(
                sum(framework in module.words for module in house.values())
            )
            for framework in FRAMEWORKS
        },
    }


def files_to_touch() -> dict[str, int]:
    """Modules of the package that each recipe of ``docs/extending.md`` adds or edits."""
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    found = {}
    for heading in EXTENSIONS:
        recipe = page.partition(f"\n## {heading}")[2].partition("\n## ")[0]
        files = _NEW.findall(recipe) + _LISTED.findall(recipe)
        found[heading] = len({name.removeprefix("src/recompute_scan/") for name in files})
    return found


def calls_of_facts() -> dict[str, int]:
    """How often one analysis of a trace works each of :data:`FACTS` out."""
    profile = cProfile.Profile()
    profile.runcall(analyse, [TRACE])
    stats = pstats.Stats(profile, stream=io.StringIO())
    found = Counter(
        {
            function: int(entry[0])
            for (path, _, function), entry in stats.stats.items()  # type: ignore[attr-defined]
            if f"/{PACKAGE}/" in path and function in FACTS
        }
    )
    return {name: found[name] for name in FACTS if found[name]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", metavar="REVISION", help="a column for an earlier revision")
    options = parser.parse_args(arguments)
    now = table(read_house())
    before = table(_at(options.before)) if options.before else {}
    for name, value in now.items():
        earlier = f"{before[name]:>34}  " if before else ""
        print(f"{name:34}{earlier}{value}")
    for heading, files in files_to_touch().items():
        print(f"{'modules to touch: ' + heading.lower():40}{files}")
    for name, often in calls_of_facts().items():
        print(f"{'calls in one analysis: ' + name:40}{often}")
    return 0


def _at(revision: str) -> dict[str, Module]:
    packed = subprocess.run(
        ["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
        return read_house(Path(folder) / "src")


def _name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(path: Path, source: Path, known: set[str]) -> Module:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    imports = frozenset(_imports(tree.body, known)) - {_name(path, source)}
    names = [name for node in tree.body for name in _named(node)]
    strings = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "import_module"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    return Module(
        name=_name(path, source),
        package=path.name == "__init__.py",
        lines=len(text.splitlines()),
        words=_words(tree),
        title=(ast.get_docstring(tree) or "").partition("\n")[0],
        names=tuple(names),
        classes=tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        imports=imports,
        hidden=frozenset(str(name) for name in strings if name in known),
    )


def _words(tree: ast.Module) -> str:
    """What the code itself names, without what is written for its readers alone."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    told = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            found.append(_ADDRESS.sub("", node.value))
        found += [
            value
            for field in ("id", "attr", "arg", "name", "module", "asname")
            if isinstance(value := getattr(node, field, None), str)
        ]
    return "\n".join(found).lower()


def _imports(nodes: Sequence[ast.AST], known: set[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if (found := whole if whole in known else node.module) in known:
                    yield found
        yield from _imports(list(ast.iter_child_nodes(node)), known)


def _named(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _reached(name: str, house: dict[str, Module]) -> set[str]:
    reached: set[str] = set()
    ahead = list(house[name].imports)
    while ahead:
        if (one := ahead.pop()) not in reached:
            reached.add(one)
            ahead.extend(house[one].imports if one in house else ())
    return reached


def _public(module: Module) -> int:
    return sum(not name.startswith("_") for name in module.names)


def _said(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "0"


if __name__ == "__main__":
    sys.exit(main())
