"""The budget of the house: how much source there may be, and in what shape.

    python -m tests.house

prints every figure beside its limit and exits with 1 where one is over. The limits only fall: a
change that makes a figure smaller lowers its limit too, and one that needs more says why in the
commit that raises it.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "recompute_scan"
# Folders with one module for each entry of a list: an entry may be short, and only the list
# imports it.
LISTS = ("cli", "findings", "frameworks", "integrations", "report/sections")
LARGE, SMALL, LONG, MANY = 700, 80, 60, 7
# A module is called by the noun that the field uses, not by a participle, adverb, pronoun or
# preposition.
BANNED = frozenset(
    "again alone apart collecting deciding early faithful followed given guarded held "
    "how_far moments opened places said seen standing telling there told upheld waiting "
    "comparing judging holding proving arranging rehearsing leaving stopping following "
    "caught settling matching joining nested copied arranged watched rehearsed".split()
)

# Most that is allowed today, and what the redesign aims for.
LIMITS: Mapping[str, tuple[int, int]] = {
    "modules": (209, 175),
    "lines of src": (69_540, 52_000),
    "lines of tests": (64_184, 46_000),
    "lines of benchmarks": (5_977, 5_500),
    "modules over 700 lines": (0, 0),
    "modules under 80 lines, outside lists": (2, 10),
    "modules that one other imports, outside lists": (28, 15),
    "modules with a name of another, outside lists": (0, 0),
    "modules with a banned name": (0, 0),
    "functions over 60 lines": (0, 0),
    "functions with more than 7 parameters": (1, 0),
    "circles of imports": (0, 0),
}


@dataclass(frozen=True)
class Module:
    """One module of the package.

    Attributes:
        name: With the package's, ``recompute_scan.trace.sources``; a package's ``__init__`` has
            the package's own.
        path: Below the package's folder.
        text: Its source.
    """

    name: str
    path: str
    text: str

    @property
    def stem(self) -> str:
        """Its last name."""
        return self.name.rpartition(".")[2]

    @property
    def is_listed(self) -> bool:
        """Whether it is an entry of a list, or a package's door."""
        folder, _, file = self.path.rpartition("/")
        return folder in LISTS or file in ("__init__.py", "__main__.py", "_version.py")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """How many it has."""
        return len(self.text.splitlines())


class House:
    """The modules of the package, and what imports what."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.modules = {one.name: one for one in _modules(root / "src" / PACKAGE)}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """For each module, the ones that it imports when it is imported itself."""
        return {name: self._targets(one, _at_import) for name, one in self.modules.items()}

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """For each module, the ones that import it anywhere, in functions too."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, one in self.modules.items():
            for target in self._targets(one, ast.walk):
                found[target].add(name)
        return found

    def figures(self) -> dict[str, list[str]]:
        """Each figure of :data:`LIMITS` that counts places, with the places."""
        apart = [one for one in self.modules.values() if not one.is_listed]
        stems = Counter(one.stem for one in apart)
        functions = [(one, node) for one in self.modules.values() for node in _functions(one)]
        return {
            "modules": [one.path for one in self.modules.values()],
            "modules over 700 lines": [
                one.path for one in self.modules.values() if one.lines > LARGE
            ],
            "modules under 80 lines, outside lists": [
                one.path for one in apart if one.lines < SMALL
            ],
            "modules that one other imports, outside lists": [
                one.path for one in apart if len(self.importers[one.name]) == 1
            ],
            "modules with a name of another, outside lists": [
                one.path for one in apart if stems[one.stem] > 1
            ],
            "modules with a banned name": [
                one.path for one in self.modules.values() if one.stem in BANNED
            ],
            "functions over 60 lines": [
                f"{one.path}:{node.lineno} {node.name}"
                for one, node in functions
                if (node.end_lineno or node.lineno) - node.lineno >= LONG
            ],
            "functions with more than 7 parameters": [
                f"{one.path}:{node.lineno} {node.name}"
                for one, node in functions
                if _parameters(node) > MANY
            ],
            "circles of imports": self._circles(),
        }

    def lines(self) -> dict[str, int]:
        """Each figure of :data:`LIMITS` that counts lines."""
        folders = {"src": f"src/{PACKAGE}", "tests": "tests", "benchmarks": "benchmarks"}
        return {
            f"lines of {name}": sum(
                len(path.read_text("utf-8").splitlines())
                for path in (self.root / folder).rglob("*.py")
            )
            for name, folder in folders.items()
        }

    def _targets(self, one: Module, walk: Callable[[ast.AST], Iterator[ast.AST]]) -> set[str]:
        found: set[str] = set()
        for node in walk(one.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    dotted = f"{node.module}.{name.name}"
                    found.add(dotted if dotted in self.modules else node.module)
            elif isinstance(node, ast.Import):
                found.update(name.name for name in node.names)
        return {name for name in found if name in self.modules and name != one.name}

    def _circles(self) -> list[str]:
        found: list[str] = []
        done: set[str] = set()

        def follow(name: str, path: tuple[str, ...]) -> None:
            if name in path:
                found.append(" -> ".join((*path[path.index(name) :], name)))
            elif name not in done:
                for target in sorted(self.imports[name]):
                    follow(target, (*path, name))
                done.add(name)

        for name in self.modules:
            follow(name, ())
        return found


def _modules(package: Path) -> Iterator[Module]:
    for path in sorted(package.rglob("*.py")):
        below = path.relative_to(package)
        name = ".".join((PACKAGE, *below.with_suffix("").parts)).removesuffix(".__init__")
        yield Module(name, below.as_posix(), path.read_text("utf-8"))


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not types_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _at_import(node)


def _functions(one: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(one.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many it takes without ``self``. A command's are its options, and are not counted."""
    if any(re.match(r"\w+\.command|click\.", ast.unparse(one)) for one in node.decorator_list):
        return 0
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in names if one.arg not in ("self", "cls")])


def main() -> int:
    """Print the figures; 1 where one is over its limit."""
    house = House()
    places = house.figures()
    counted = {name: len(found) for name, found in places.items()} | house.lines()
    over = 0
    print(f"{'':48}{'today':>8}{'limit':>8}{'aim':>8}")
    for name, (limit, aim) in LIMITS.items():
        today = counted[name]
        over += today > limit
        print(f"{name:48}{today:>8,}{limit:>8,}{aim:>8,}{'  over' if today > limit else ''}")
        if "--places" in sys.argv or today > limit:
            print(*(f"    {place}" for place in places.get(name, ())), sep="\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
