"""Switches in a Python script, from its syntax tree. The script is never imported."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from recompute_scan.frameworks import parallel, registry
from recompute_scan.frameworks.base import Setting
from recompute_scan.lint.library_calls import HELPERS, Inside, LibraryCalls, Script, ScriptNames
from recompute_scan.lint.rules import CalledHelper, CheckpointSwitch, Unreadable
from recompute_scan.result.run_record import source_lines

_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.IfExp, ast.BoolOp, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)
# The names of torch's checkpoint functions, which other libraries took over.
CHECKPOINTS = re.compile(
    r"\bcheckpoint(?:ing|_wrapper|_sequential)?\s*[(,]|_checkpointing\w{0,80}\s*[(=]"
)
_DOTTED = re.compile(r"(?<!\w)\w+(?:[\s\\]*\.[\s\\]*\w+)+")
_FORMATTED = re.compile(r"r?fr?['\"]", re.IGNORECASE)
_MOST_PARTS, _MOST_VALUES = 200, 1_000
_DEEPEST = 3
# No person writes so many; the number of comparisons grows with their square.
_MOST_SWITCHES = 200


def read_script(text: str) -> Script:
    """The facts of the script.

    Raises:
        Unreadable: It is no Python that this version of Python knows.
    """
    if any(name.count(".") > _MOST_PARTS for name in _DOTTED.findall(text)):
        # To read one takes memory that grows with the square of its parts.
        raise Unreadable(f"a dotted name has more than {_MOST_PARTS} parts")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if text.count("{") > _MOST_VALUES and _most_values(text) > _MOST_VALUES:
                # Up to Python 3.11 the time to parse one grows with the square of its values.
                raise Unreadable(f"an f-string in it has more than {_MOST_VALUES:,} values")
            reader = _ScriptReader(ast.parse(text))
        reader.visit(reader.tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise Unreadable(f"it is not Python ({type(error).__name__})") from None
    return reader.script(text)


def _most_values(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text, newline=None).readline)
    formatted = (one.string for one in tokens if _FORMATTED.match(one.string))
    return max((one.replace("{{", "").count("{") for one in formatted), default=0)


_EXPECT_FAILURE = frozenset({"raises", "assertRaises", "assertRaisesRegex"})


class _ScriptReader(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.names = ScriptNames(tree)
        self.scope: tuple[str, ...] = ()
        self.branch: tuple[tuple[int, str], ...] = ()
        self.found = Script()
        self.library = LibraryCalls(self.names, self.found)
        self.calls: list[CalledHelper] = []

    def script(self, text: str) -> Script:
        names = set(self.names.origins.values())
        helpers = self._helpers()
        return replace(
            self.found,
            switches=[*self._all_switches(helpers), *self.library.plugged],
            modules=frozenset(
                f"{name}:{kind.lineno}"
                for name, kind in self.names.classes.items()
                if any(self.names.origin(base).endswith("LightningModule") for base in kind.bases)
            ),
            helpers=helpers,
            parses=bool(names & {"transformers.HfArgumentParser", "trl.TrlParser"}),
            trl=any(name in ("trl.SFTConfig", "trl.TrlParser") for name in names),
            calls=registry.calls_in(text),
            checkpoints=min(len(CHECKPOINTS.findall(text)), 2),
            checkpointing=self._checkpointing(text),
            imports=frozenset(names),
            sections=self.found.sections[:_MOST_SWITCHES],
        )

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, _SCOPES):
            self._into(node, scope=getattr(node, "name", "lambda"))
        elif isinstance(node, _BRANCHES) and not (
            isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")
        ):
            if isinstance(node, ast.If):
                self._condition(node)
            self._arms(node)
        else:
            if isinstance(node, _LEAVES):
                self.found.leaves.append(node.lineno)
            elif isinstance(node, ast.Assign):
                self._assigned(node)
            super().generic_visit(node)

    def _into(self, node: ast.AST, scope: str) -> None:
        kept = self.scope, self.branch
        self.scope, self.branch = (*self.scope, f"{scope}:{getattr(node, 'lineno', 0)}"), ()
        super().generic_visit(node)
        self.scope, self.branch = kept

    def _arms(self, node: ast.AST) -> None:
        kept = self.branch
        for arm, value in ast.iter_fields(node):
            self.branch = (*kept, (id(node), arm))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self.branch = kept

    def _condition(self, node: ast.If) -> None:
        """Its text; of ``if a and b: return``, or one that raises, that not both are true below."""
        self.found.tests[id(node)] = ast.unparse(node.test)
        leaves = isinstance(node.body[-1], ast.Return | ast.Raise) and not self.branch
        if leaves and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            conditions = frozenset(map(ast.unparse, node.test.values))
            self.found.refused.append((node.lineno, self.scope, conditions))

    def _assigned(self, node: ast.Assign) -> None:
        given = node.value.args if isinstance(node.value, ast.Call) else ()
        wrapped = set(map(ast.unparse, given))
        for target in node.targets:
            name = ast.unparse(target)
            if name not in wrapped:
                self.found.rebound.append((name, node.lineno, not self.branch))

    def visit_Dict(self, node: ast.Dict) -> None:
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if "activation_checkpointing" in keys and not keys.isdisjoint(parallel.DEEPSPEED_ROOTS):
            self.found.sections.append(tuple(_entries(node, ())))
        super().generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        calls = [item.context_expr for item in node.items]
        names = {ast.unparse(one.func) for one in calls if isinstance(one, ast.Call)}
        # A test expects the calls in it to fail.
        if _EXPECT_FAILURE.isdisjoint(name.rpartition(".")[2] for name in names):
            super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.library.read(node, self.scope, self.branch)
        name = self.names.origin(node.func)
        local = isinstance(node.func, ast.Name) and node.func.id in self.names.functions
        if local or ("." in name and node.args and name.rpartition(".")[2] in HELPERS):
            given = tuple(map(ast.unparse, node.args))
            name = ast.unparse(node.func) if local else name
            call = CalledHelper(name, node.lineno, given, self.scope, self.branch)
            (self.calls if local else self.found.imported).append(call)
        super().generic_visit(node)

    def _checkpointing(self, text: str) -> frozenset[str]:
        found: set[str] = set()
        lines = source_lines(text)
        parts = [(top, top.name) for top in self.names.functions.values()]
        for kind in self.names.classes.values():
            methods = (part for part in kind.body if isinstance(part, ast.FunctionDef))
            parts += [(part, name) for part in methods for name in (kind.name, part.name)]
        for part, name in parts:
            own = "".join(lines[part.lineno - 1 : part.end_lineno])
            if name[:2] != "__" and CHECKPOINTS.search(own):
                found.add(name)
        return frozenset(found - {"forward"})

    def _all_switches(self, helpers: Mapping[str, Sequence[Inside]]) -> list[CheckpointSwitch]:
        """The script's switches; one in a helper stands where the helper is called."""
        moved: set[CheckpointSwitch] = set()
        derived: list[CheckpointSwitch] = []
        for call in self.calls:
            for place, switch, certain in helpers.get(call.name, ()):
                if place < len(call.given):
                    moved.add(switch)
                    derived.append(switch.moved(call, call.given[place], certain=certain))
            if len(derived) > _MOST_SWITCHES:
                break
        found = [*(one for one in self.found.switches if one not in moved), *derived]
        if len(found) > _MOST_SWITCHES:
            raise Unreadable(f"it switches checkpointing on more than {_MOST_SWITCHES} times")
        return found

    def _helpers(self) -> dict[str, list[Inside]]:
        """By function, the switches on what it is given."""
        found: dict[str, list[Inside]] = {}
        scopes: dict[tuple[str, ...], ast.FunctionDef] = {
            (f"{name}:{helper.lineno}",): helper for name, helper in self.names.functions.items()
        }
        for switch in self.found.switches[: _MOST_SWITCHES + 1]:
            helper = scopes.get(switch.scope)
            if helper is None or any(
                name == switch.subject and helper.lineno < line < switch.line
                for name, line, _ in self.found.rebound
            ):
                continue
            inside = found.setdefault(helper.name, [])
            parameters = [given.arg for given in helper.args.args]
            if switch.subject in parameters:
                left = any(helper.lineno < line < switch.line for line in self.found.leaves)
                certain = switch.certain and not switch.branch and not left
                inside.append((parameters.index(switch.subject), switch, certain))
        return found


def _entries(node: ast.Dict, path: tuple[str, ...]) -> Iterator[Setting]:
    """The constants of a dictionary, with their lines."""
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant):
            continue
        at = (*path, str(key.value))
        if isinstance(value, ast.Dict) and len(at) < _DEEPEST:
            yield from _entries(value, at)
        else:
            constant = value.value if isinstance(value, ast.Constant) else None
            yield Setting(at, constant, key.lineno)
