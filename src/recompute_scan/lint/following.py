"""A script followed without running it: which checkpoints are reached from within others.

Statements are walked in order. A name stands for objects of the classes that the files define, for
functions, for constants, or for nothing where it is not known; of a condition that is not known
both arms are walked, and what is met there has it. Loops are walked once. Whatever calls whatever,
a checkpoint that is met while another's function is walked is inside it.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache

from msgspec import Struct

from recompute_scan.lint.values import (
    NONE,
    CheckpointSite,
    Conditions,
    Constant,
    External,
    Frame,
    Function,
    Held,
    Kind,
    Method,
    Module,
    Object,
    Parent,
    Partial,
    Value,
    contradict,
    elements,
    one,
    pooled,
    sequence,
    truth,
    under,
)

# Functions that checkpoint what they are given, by the end of their name: which argument that is,
# and the variant without ``use_reentrant`` (torch up to 2.15; the others as read in their code).
_CALLS = {
    "torch.utils.checkpoint.checkpoint": (0, "reentrant"),
    "torch.utils.checkpoint.checkpoint_sequential": (0, "reentrant"),
    "torch.utils.checkpoint.CheckpointFunction.apply": (0, "reentrant"),
    "deepspeed.checkpointing.checkpoint": (0, "reentrant"),
    "activation_checkpointing.checkpointing.checkpoint": (0, "reentrant"),
    "megatron.core.tensor_parallel.checkpoint": (0, "reentrant"),
    "transformer_engine.pytorch.checkpoint": (0, "reentrant"),
}
# Functions that put a checkpoint around a module, to stay there.
_WRAPPERS = {
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": (
        "non-reentrant"
    ),
    "torch.distributed._composable.checkpoint": "non-reentrant",
    "torch.distributed._composable.checkpoint_activation.checkpoint": "non-reentrant",
    "fairscale.nn.checkpoint.checkpoint_wrapper": "reentrant",
    "fairscale.nn.checkpoint_wrapper": "reentrant",
}
_APPLIES = ("apply_activation_checkpointing", "set_activation_checkpointing")
_SEEN = {**_CALLS, **_WRAPPERS}
_TRUE = {"torch.is_grad_enabled"}
_FALSE = {"torch.jit.is_scripting", "torch.jit.is_tracing", "torch.compiler.is_compiling"}
# What is true of a training.
_TRAINING = {"training", "requires_grad"}
_SAME = set(
    "to cuda cpu train eval half bfloat16 float double requires_grad_ compile to_empty".split()
)
_ADDS = {"append", "extend", "insert", "add_module", "register_module", "add", "update"}
_PAIRS = {"named_children", "named_modules", "items"}
_ALL = {"modules", "named_modules"}
_HELD = {"children", "values", *_PAIRS, *_ALL}
# Calls of these keep nothing for the backward pass.
_KEEPS_NOTHING = ("Dropout", "Identity", "Flatten", "Unflatten", "DropPath")
_HANDLERS = {
    kind: f"_on_{kind.__name__.lower()}"
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
_LAYERS = ("torch.nn.", "nn.")
_DEEPEST = 40
_STEPS = 10_000


class Enough(Exception):
    """More than is walked of one function."""


class Nested(Struct, eq=False):
    """A checkpoint that is met inside another.

    Attributes:
        outer: The other.
        inner: The one.
        conditions: What must be true.
        followed: Whether what runs behind the inner one, still in the outer, keeps anything for the
            backward pass; ``None`` where that is not known.
    """

    outer: CheckpointSite
    inner: CheckpointSite
    conditions: Conditions
    followed: bool | None = False


class Sources:
    """The Python files that were read, found by the names that others import."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.tree = lru_cache(maxsize=200)(lambda path: ast.parse(texts[path]))

    def locate(self, base: str) -> str | None:
        """The file of a module, from its path without a suffix."""
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.texts), None)

    def imported(self, name: str, file: str) -> Module | None:
        """What a dotted name with its leading dots stands for in a file."""
        dotted = name.lstrip(".")
        parts = dotted.split(".")
        folder = posixpath.dirname(file)
        if level := len(name) - len(dotted):
            folders = [posixpath.normpath(posixpath.join(folder, *[".."] * (level - 1)))]
        elif parts[0] == "torch":
            return None
        else:
            folders = [folder]
            while (folder := posixpath.dirname(folders[-1])) != folders[-1]:
                folders.append(folder)
            folders = [each for f in folders for each in (f, posixpath.join(f, "src"))]
        for each in folders:
            for depth in (len(parts), len(parts) - 1):
                base = posixpath.normpath(posixpath.join(each, *parts[:depth]))
                if (depth or level) and self.locate(base):
                    return Module(base, ".".join(parts[depth:]))
        return None


class Region(Struct, eq=False):
    """A checkpoint that is being walked, and those that were met in it so far."""

    site: CheckpointSite
    loops: int
    met: list[Nested]


class Follower:
    """One walk, from the statements of one file on.

    Attributes:
        nested: The checkpoints that were met inside others.
        walked: The functions that were walked.
        made: The objects of the files' classes that were made.
        early_stop_off: torch's early stop is switched off.
        steps: Statements and expressions that were walked.
    """

    def __init__(self, sources: Sources, file: str) -> None:
        self.sources = sources
        self.nested: list[Nested] = []
        self.walked: set[int] = set()
        self.made: list[Object] = []
        self.early_stop_off = False
        self._modules: dict[str, Frame] = {}
        self._conditions: Conditions = NONE
        self._regions: list[Region] = []
        self._loops = self._depth = self._changes = self._without_gradient = 0
        self._done: dict[object, Held] = {}
        # Wrappers for models that are not known: by what chooses, what wraps, and where.
        self._everywhere: list[tuple[Held, Held, ast.Call, Frame, Conditions]] = []
        self.steps = 0
        self._file = file

    # --- what begins a walk

    def run(self) -> Frame:
        """Walk the file's own statements; its names."""
        return self._module(self._file, "__main__")

    def call_whole(self, value: Value, frame: Frame) -> Held:
        """Call it with arguments that are not known."""
        return self._call(one(value), [], {}, ast.Call(ast.Name(""), [], [], lineno=0), frame)

    def make(self, kind: Kind, frame: Frame) -> Object:
        """An object of a class, made with arguments that are not known."""
        made = self.call_whole(kind, frame)
        return next(value for value, _ in made if isinstance(value, Object))

    @property
    def wraps_anything(self) -> bool:
        """Whether a wrapper waits for models that are not known."""
        return bool(self._everywhere)

    def forced(self, held: Held) -> Held:
        """What imported names stand for."""
        return pooled(
            under(self._imported(value), when) if isinstance(value, Module) else ((value, when),)
            for value, when in held
        )

    # --- modules and names

    def _module(self, file: str, name: str = "") -> Frame:
        if file not in self._modules:
            frame = Frame(file, {"__name__": one(Constant(name))})
            self._modules[file] = frame
            kept = self._conditions, self._regions, self._loops
            self._conditions, self._regions, self._loops = NONE, [], 0
            self._block(self.sources.tree(file).body, frame)
            self._conditions, self._regions, self._loops = kept
        return self._modules[file]

    def _imported(self, module: Module) -> Held:
        file = self.sources.locate(module.base)
        if file is None:
            return ()
        if not module.name:
            return one(module)
        name, _, rest = module.name.partition(".")
        if found := self._module(file).names.get(name):
            found = self.forced(found)
            return self._attributes(found, rest) if rest else found
        if self.sources.locate(f"{module.base}/{name}"):
            return self._imported(Module(f"{module.base}/{name}", rest))
        return ()

    def _look_up(self, name: str, frame: Frame) -> Held:
        owner = frame.owner(name)
        if owner is None:
            return one(External(name))
        held = owner.names[name]
        if any(isinstance(value, Module) and value.name for value, _ in held):
            held = owner.names[name] = self.forced(held)
        return held

    def _attributes(self, held: Held, name: str) -> Held:
        return pooled(under(self._attribute(value, name), when) for value, when in held)

    def _attribute(self, value: Value, name: str) -> Held:
        found: Held | None = None
        if isinstance(value, External):
            return one(External(f"{value.name}.{name}"))
        if isinstance(value, Module):
            return self._imported(Module(value.base, name))
        if isinstance(value, Object):
            if name in value.attributes:
                return value.attributes[name]
            if isinstance(value.kind, Kind):
                found = value.kind.find(name)
                constants = found and all(isinstance(each, Constant) for each, _ in found)
                if found and value.vague and constants:
                    return ()
        elif isinstance(value, Parent):
            if isinstance(value.owner.kind, Kind):
                found = value.owner.kind.find(name, value.kind)
            value = value.owner
        elif isinstance(value, Kind):
            return value.find(name) or ()
        return tuple((self._bound(each, value), when) for each, when in found or ())

    def _bound(self, value: Value, owner: Value) -> Value:
        bare = not isinstance(value, Function) or "staticmethod" in value.decorators
        return value if bare else Method(value, owner)  # type: ignore[arg-type]

    # --- statements: each says whether what follows it is not reached

    def _block(self, body: Iterable[ast.stmt], frame: Frame) -> bool:
        for statement in body:  # noqa: SIM110 - a generator more for each block
            if self._statement(statement, frame):
                return True
        return False

    def _statement(self, node: ast.stmt, frame: Frame) -> bool:
        self._step()
        handler = getattr(self, _HANDLERS[type(node)], None)
        if handler is not None:
            return bool(handler(node, frame))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame)
        return isinstance(node, ast.Raise | ast.Break | ast.Continue)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise Enough

    def _on_import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            found = self.sources.imported(name, frame.file)
            frame.names[alias.asname or name] = one(found or External(name))

    def _on_importfrom(self, node: ast.ImportFrom, frame: Frame) -> None:
        for alias in node.names:
            name = f"{'.' * node.level}{node.module or ''}"
            name += ("." if node.module else "") + alias.name
            found = self.sources.imported(name, frame.file)
            if found is not None and (found.name or alias.name != "*"):
                frame.names[alias.asname or alias.name] = one(found)
            else:
                frame.names[alias.asname or alias.name] = one(External(name))
            if alias.name == "*" and found is not None:
                self._star(found, frame)

    def _star(self, module: Module, frame: Frame) -> None:
        file = self.sources.locate(module.base)
        if file is not None:
            names = self._module(file).names.items()
            frame.names.update({name: held for name, held in names if name[0] != "_"})

    def _on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        frame.names[node.name] = self._function(node, frame)

    _on_asyncfunctiondef = _on_functiondef

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        frame: Frame,
        kind: Kind | None = None,
    ) -> Held:
        decorators = [self.value(each, frame) for each in node.decorator_list]
        names = {
            value.last for held in decorators for value, _ in held if isinstance(value, External)
        }
        held = one(Function(node, frame, kind, frozenset(names)))
        for decorator in reversed(decorators):
            if decorator and not isinstance(decorator[0][0], External):
                call = ast.Call(ast.Name(node.name), [], [], lineno=node.lineno)
                held = self._call(decorator, [held], {}, call, frame) or held
        return held

    def _on_classdef(self, node: ast.ClassDef, frame: Frame) -> None:
        bases = tuple(value for base in node.bases for value, _ in self.value(base, frame))
        kind = Kind(node.name, {}, bases)
        inside = Frame(frame.file, kind.names, frame)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                kind.names[statement.name] = self._function(statement, frame, kind)
            else:
                self._statement(statement, inside)
        frame.names[node.name] = one(kind)

    def _on_return(self, node: ast.Return, frame: Frame) -> bool:
        frame.returned.append(
            under(self.value(node.value, frame), self._conditions) if node.value else ()
        )
        return True

    def _on_assign(self, node: ast.Assign, frame: Frame) -> None:
        held = self.value(node.value, frame)
        for target in node.targets:
            self._bind(target, held, frame)

    def _on_annassign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self._bind(node.target, self.value(node.value, frame), frame)

    def _on_augassign(self, node: ast.AugAssign, frame: Frame) -> None:
        added = self.value(node.value, frame)
        if isinstance(node.target, ast.Name | ast.Attribute):
            for value, _ in self.value(node.target, frame):
                if isinstance(value, Object):
                    value.items.append(elements(added))

    def _bind(self, target: ast.expr, held: Held, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = held
        elif isinstance(target, ast.Tuple | ast.List):
            for number, each in enumerate(target.elts):
                self._bind(each, self._part(held, number, len(target.elts)), frame)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, held, frame)
        elif isinstance(target, ast.Attribute):
            for owner, when in self.value(target.value, frame):
                self._set(owner, target.attr, under(held, when))
        elif isinstance(target, ast.Subscript):
            for owner, when in self.value(target.value, frame):
                if isinstance(owner, Object) and held:
                    known = {id(value) for value, _ in elements(one(owner))}
                    if not {id(value) for value, _ in held} <= known:
                        owner.items.append(under(held, when | self._conditions))
                        self._changes += 1

    def _set(self, owner: Value, name: str, held: Held) -> None:
        if isinstance(owner, Object):
            # Under a condition the value from before may be there as well.
            if self._conditions and name in owner.attributes:
                held = pooled((owner.attributes[name], under(held, self._conditions)))
            owner.attributes[name] = held
            self._changes += 1

    def _part(self, held: Held, number: int, size: int) -> Held:
        parts = []
        for value, when in held:
            if isinstance(value, Object) and len(value.items) == size:
                parts.append(under(value.items[number], when))
            elif isinstance(value, Object):
                parts.append(under(elements(one(value)), when) or ((value, when),))
        return pooled(parts)

    def _on_if(self, node: ast.If, frame: Frame) -> bool:
        known, true, false = self._test(node.test, frame)
        if known is not None:
            return self._block(node.body if known else node.orelse, frame)
        before, names = self._conditions, frame.names
        ends = []
        for conditions, body in ((true, node.body), (false, node.orelse)):
            frame.names = dict(names)
            self._conditions = before | conditions
            ended = contradict(self._conditions) or self._block(body, frame)
            ends.append((ended, frame.names, self._conditions))
        (left, with_true, after_true), (other_left, with_false, after_false) = ends
        self._conditions, frame.names = before, names
        if left and other_left:
            return True
        if left or other_left:
            # The rest is reached by one arm only.
            frame_names = with_false if left else with_true
            self._conditions = after_false if left else after_true
        else:
            frame_names = self._merged(with_true, true, with_false, false)
        names.clear()
        names.update(frame_names)
        return False

    def _merged(
        self, one_way: dict[str, Held], true: Conditions, other: dict[str, Held], false: Conditions
    ) -> dict[str, Held]:
        merged = {}
        for name in {**one_way, **other}:
            left, right = one_way.get(name), other.get(name)
            if left is right and left is not None:
                merged[name] = left
            else:
                merged[name] = pooled((under(left or (), true), under(right or (), false)))
        return merged

    def _on_for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> bool:
        self._bind(node.target, elements(self.value(node.iter, frame)), frame)
        self._loop(node.body, frame)
        return self._block(node.orelse, frame)

    _on_asyncfor = _on_for

    def _on_while(self, node: ast.While, frame: Frame) -> bool:
        if self._test(node.test, frame)[0] is not False:
            self._loop(node.body, frame)
        return False

    def _loop(self, body: list[ast.stmt], frame: Frame) -> None:
        kept = self._conditions
        self._loops += 1
        self._block(body, frame)
        self._loops -= 1
        self._conditions = kept

    def _on_with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> bool:
        held = [self.value(item.context_expr, frame) for item in node.items]
        off = any(
            isinstance(value, External) and value.last in ("no_grad", "inference_mode")
            for each in held
            for value, _ in each
        )
        self._without_gradient += off
        ended = self._block(node.body, frame)
        self._without_gradient -= off
        return ended

    _on_asyncwith = _on_with

    def _on_try(self, node: ast.Try, frame: Frame) -> bool:
        ended = self._block(node.body, frame) or self._block(node.orelse, frame)
        return self._block(node.finalbody, frame) or ended

    def _on_match(self, node: ast.Match, frame: Frame) -> None:
        subject = _written(node.subject)
        for case in node.cases:
            kept, self._conditions = (
                self._conditions,
                self._conditions | {(frozenset({f"{subject} is {_written(case.pattern)}"}), True)},
            )
            self._block(case.body, frame)
            self._conditions = kept

    # --- conditions

    def _test(self, node: ast.expr, frame: Frame) -> tuple[bool | None, Conditions, Conditions]:
        """Whether it is true, what is true where it is, and what is where it is not."""
        self._step()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known, true, false = self._test(node.operand, frame)
            return None if known is None else not known, false, true
        text = frozenset({_written(node)})
        plain = frozenset({(text, True)}), frozenset({(text, False)})
        if isinstance(node, ast.BoolOp):
            decides = isinstance(node.op, ast.Or)
            open_ones = []
            for part in node.values:
                found = self._test(part, frame)
                if found[0] is decides:
                    return decides, NONE, NONE
                if found[0] is None:
                    open_ones.append(found[1:])
            if not open_ones:
                return not decides, NONE, NONE
            if len(open_ones) == 1:
                return None, *open_ones[0]
            true, false = (frozenset().union(*arm) for arm in zip(*open_ones, strict=True))
            if decides:
                return None, plain[0], false
            if all(holds for _, holds in true):
                return None, true, frozenset({(frozenset().union(*(t for t, _ in true)), False)})
            return None, true, plain[1]
        known = truth(self.value(node, frame), self._conditions)
        if known is None and isinstance(node, ast.Attribute) and node.attr in _TRAINING:
            known = True
        return known, *plain

    # --- expressions

    def value(self, node: ast.expr, frame: Frame) -> Held:
        """What an expression stands for."""
        self._step()
        handler = getattr(self, _HANDLERS[type(node)], None)
        if handler is not None:
            return handler(node, frame) or ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, frame)
        return ()

    def _on_constant(self, node: ast.Constant, frame: Frame) -> Held:
        return one(Constant(node.value))

    def _on_name(self, node: ast.Name, frame: Frame) -> Held:
        return self._look_up(node.id, frame)

    def _on_attribute(self, node: ast.Attribute, frame: Frame) -> Held:
        held = self._attributes(self.value(node.value, frame), node.attr)
        properties = [
            value
            for value, _ in held
            if isinstance(value, Method) and value.function.decorators & {"property"}
        ]
        return self._call(one(properties[0]), [], {}, None, frame) if properties else held

    def _on_lambda(self, node: ast.Lambda, frame: Frame) -> Held:
        return one(Function(node, frame))

    def _on_ifexp(self, node: ast.IfExp, frame: Frame) -> Held:
        known, true, false = self._test(node.test, frame)
        if known is not None:
            return self.value(node.body if known else node.orelse, frame)
        return self._both(((true, node.body), (false, node.orelse)), frame)

    def _both(self, arms: Iterable[tuple[Conditions, ast.expr]], frame: Frame) -> Held:
        kept, found = self._conditions, []
        for conditions, node in arms:
            self._conditions = kept | conditions
            if not contradict(self._conditions):
                found.append(under(self.value(node, frame), conditions))
        self._conditions = kept
        return pooled(found)

    def _on_boolop(self, node: ast.BoolOp, frame: Frame) -> Held:
        found: list[Held] = []
        for part in node.values:
            held = self.value(part, frame)
            known = truth(held, self._conditions)
            if isinstance(part, ast.Call) and not _constant(held):
                known = None  # what a function gives back is not all that it says
            if known is isinstance(node.op, ast.Or):
                return pooled((*found, held)) if found else held
            if known is None:
                found.append(held)
        return () if () in found else pooled(found) or held

    def _on_unaryop(self, node: ast.UnaryOp, frame: Frame) -> Held:
        known = truth(self.value(node.operand, frame), self._conditions)
        if known is None or not isinstance(node.op, ast.Not):
            return ()
        return one(Constant(not known))

    def _on_binop(self, node: ast.BinOp, frame: Frame) -> Held:
        held = pooled((self.value(node.left, frame), self.value(node.right, frame)))
        if not isinstance(node.op, ast.Add | ast.Sub):
            self._keeps(None)
        return tuple((value, when) for value, when in held if isinstance(value, Object))

    def _on_compare(self, node: ast.Compare, frame: Frame) -> Held:
        sides = [self.value(side, frame) for side in (node.left, *node.comparators)]
        if len(sides) != 2 or any(len(side) != 1 or side[0][1] for side in sides):
            return ()
        (left, _), (right, _) = sides[0][0], sides[1][0]
        equal: bool | None = None
        if isinstance(left, Constant) and isinstance(right, Constant):
            equal = left.value == right.value
        elif isinstance(left, Kind | External) and isinstance(right, Kind | External):
            equal = left is right or (
                isinstance(left, External)
                and isinstance(right, External)
                and left.name == right.name
            )
        elif isinstance(right, Constant) and right.value is None:
            equal = None if isinstance(left, External | Module) else False
        if equal is None or not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            return ()
        return one(Constant(equal is isinstance(node.ops[0], ast.Eq | ast.Is)))

    def _on_namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Held:
        held = self.value(node.value, frame)
        self._bind(node.target, held, frame)
        return held

    def _on_list(self, node: ast.List | ast.Tuple | ast.Set, frame: Frame) -> Held:
        return sequence(self._flat(node.elts, frame))

    _on_tuple = _on_set = _on_list

    def _flat(self, nodes: Iterable[ast.expr], frame: Frame) -> list[Held]:
        """Each one's value, of one with a star each part's."""
        found: list[Held] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                for value, when in self.value(node.value, frame):
                    if isinstance(value, Object):
                        found += [under(item, when) for item in value.items]
            else:
                found.append(self.value(node, frame))
        return found

    def _on_dict(self, node: ast.Dict, frame: Frame) -> Held:
        made = Object(External("dict"))
        for key, each in zip(node.keys, node.values, strict=True):
            held = self.value(each, frame)
            if isinstance(key, ast.Constant):
                made.attributes[str(key.value)] = held
            else:
                made.vague = True
                made.items.append(held)
        return one(made)

    def _on_listcomp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: Frame
    ) -> Held:
        inside = Frame(frame.file, {}, frame, caller=frame.caller)
        kept = self._conditions
        for loop in node.generators:
            self._bind(loop.target, elements(self.value(loop.iter, inside)), inside)
            for test in loop.ifs:
                known, true, _ = self._test(test, inside)
                self._conditions |= true if known is None else NONE
        self._loops += 1
        made = node.value if isinstance(node, ast.DictComp) else node.elt
        held = under(self.value(made, inside), self._conditions - kept)
        self._loops -= 1
        self._conditions = kept
        return sequence([held])

    _on_setcomp = _on_generatorexp = _on_dictcomp = _on_listcomp

    def _on_subscript(self, node: ast.Subscript, frame: Frame) -> Held:
        key = node.slice
        found = []
        for value, when in self.value(node.value, frame):
            if not isinstance(value, Object):
                continue
            place = key.value if isinstance(key, ast.Constant) else None
            if isinstance(key, ast.Slice):
                held = one(value)
            elif isinstance(place, str):
                held = value.attributes.get(place, ())
            elif isinstance(place, int) and place < len(value.items) > 1:
                held = value.items[place]
            else:
                self.value(key, frame)
                held = elements(one(value))
            found.append(under(held, when))
        return pooled(found)

    # --- calls

    def _on_call(self, node: ast.Call, frame: Frame) -> Held:
        func = node.func
        owners = self.value(func.value, frame) if isinstance(func, ast.Attribute) else ()
        arguments = self._flat(node.args, frame)
        keywords = {
            "**" if each.arg is None else each.arg: self.value(each.value, frame)
            for each in node.keywords
        }
        if not isinstance(func, ast.Attribute):
            return self._call(self.value(func, frame), arguments, keywords, node, frame)
        found = []
        for owner, when in owners:
            held = self._attribute(owner, func.attr)
            if held:
                found.append(self._call(under(held, when), arguments, keywords, node, frame))
            elif isinstance(owner, Object | Parent):
                found.append(self._unknown(owner, func.attr, arguments, keywords, node, frame))
            elif isinstance(owner, Partial) and func.attr == "func":
                found.append(one(owner.target))
        return pooled(found)

    def _call(
        self,
        held: Held,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
    ) -> Held:
        found = []
        kept = self._conditions
        for value, when in held:
            self._conditions = kept | when
            if not contradict(self._conditions):
                found.append(under(self._apply(value, arguments, keywords, node, frame), when))
        self._conditions = kept
        return pooled(found)

    def _apply(
        self,
        value: Value,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
    ) -> Held:
        self._step()
        if isinstance(value, Function):
            return self._run(value, arguments, keywords, node, frame)
        if isinstance(value, Method):
            return self._run(value.function, [one(value.owner), *arguments], keywords, node, frame)
        if isinstance(value, Partial):
            given = [*value.arguments, *arguments]
            if isinstance(value.target, External):
                # A library's function is called where the script says with what.
                node = ast.Call(value.call.func, value.call.args[1:], [], lineno=value.call.lineno)
                frame = value.frame
            return self._apply(value.target, given, {**value.keywords, **keywords}, node, frame)
        if isinstance(value, Kind):
            return self._make(value, arguments, keywords, node, frame)
        if isinstance(value, Object):
            return self._enter_all(value, arguments, keywords, node, frame)
        if isinstance(value, External) and node is not None:
            return self._external(value, arguments, keywords, node, frame)
        return ()

    def _run(
        self,
        function: Function,
        arguments: list[Held],
        keywords: dict[str, Held],
        call: ast.Call | None,
        frame: Frame,
    ) -> Held:
        node = function.node
        self.walked.add(id(node))
        inside = Frame(function.frame.file, {}, function.frame, function)
        if call is not None:
            inside.caller = (frame, call.lineno)
        self._parameters(function, inside, arguments, keywords, call)
        if self._depth > _DEEPEST:
            return ()
        key = (
            function.node,
            function.frame,
            tuple(
                (name, tuple((_same(value), when) for value, when in held))
                for name, held in inside.names.items()
            ),
            self._conditions,
            tuple(region.site for region in self._regions),
            (self._changes, self._loops, self._without_gradient),
        )
        if key in self._done:
            self._keeps(None)
            return self._done[key]
        self._done[key] = ()
        kept = self._conditions, self._without_gradient
        self._depth += 1
        self._without_gradient += bool(function.decorators & {"no_grad", "inference_mode"})
        if isinstance(node, ast.Lambda):
            held = self.value(node.body, inside)
        else:
            ended = self._block(node.body, inside)
            if not ended:
                inside.returned.append(one(Constant(None)))
            held = pooled(
                tuple((value, when - kept[0]) for value, when in each) for each in inside.returned
            )
            if any(not each for each in inside.returned) and all(
                isinstance(value, Constant) for value, _ in held
            ):
                held = ()  # one of what it returns is not known
        self._depth -= 1
        self._conditions, self._without_gradient = kept
        self._done[key] = held
        return held

    def _parameters(
        self,
        function: Function,
        inside: Frame,
        arguments: list[Held],
        keywords: dict[str, Held],
        call: ast.Call | None,
    ) -> None:
        given = function.node.args
        places = [*given.posonlyargs, *given.args]
        names = [each.arg for each in places]
        # Where the call says anything that is not known, so may be what it does not say.
        open_call = "**" in keywords
        defaults = dict(zip(reversed(names), reversed(given.defaults), strict=False))
        for keyword, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            names.append(keyword.arg)
            if default is not None:
                defaults[keyword.arg] = default
        for name in names:
            default = None if open_call else defaults.get(name)
            inside.names[name] = self.value(default, function.frame) if default else ()
        for name, held in zip(names[: len(places)], arguments, strict=False):
            inside.names[name] = held
        if given.vararg:
            inside.names[given.vararg.arg] = sequence(arguments[len(places) :])
        more = {name: held for name, held in keywords.items() if name not in names}
        inside.names.update({n: held for n, held in keywords.items() if n in names})
        if given.kwarg:
            rest = Object(External("dict"), more, vague=open_call)
            inside.names[given.kwarg.arg] = one(rest)
        if call is not None and not any(isinstance(each, ast.Starred) for each in call.args):
            written = dict(zip(names[len(arguments) - len(call.args) :], call.args, strict=False))
            written.update({each.arg: each.value for each in call.keywords if each.arg})
            inside.given = written

    def _make(
        self,
        kind: Kind,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
    ) -> Held:
        made = Object(kind, vague="**" in keywords)
        self.made.append(made)
        begin = kind.find("__init__")
        if begin:
            methods = tuple((self._bound(value, made), when) for value, when in begin)
            self._call(methods, arguments, keywords, node, frame)
        else:
            made.items += arguments
            made.attributes.update({k: held for k, held in keywords.items() if k != "**"})
        return one(made)

    def _unknown(
        self,
        owner: Object | Parent,
        name: str,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call,
        frame: Frame,
    ) -> Held:
        """A method that no file defines, of torch's modules or Python's own."""
        if isinstance(owner, Parent):
            if name == "__init__":
                owner.owner.items += arguments
            elif name in ("__call__", "forward"):
                return self._body(owner.owner, arguments, keywords, node, frame, own=False)
            return ()
        if name in _SAME:
            return one(owner)
        if name in _ADDS:
            given = arguments[-1:] if name != "extend" else [elements(a) for a in arguments]
            owner.items += [under(each, self._conditions) for each in given]
            self._changes += 1
        elif name in _HELD:
            parts = owner.below() if name in _ALL else list(owner.parts())
            items = tuple((each, NONE) for each in parts)
            return sequence([next(iter([sequence([(), items])]))] if name in _PAIRS else [items])
        elif name == "apply" and arguments:
            for each in (*owner.below(), owner):
                self._call(arguments[0], [one(each)], {}, node, frame)
            return one(owner)
        elif name in ("get", "pop") and isinstance(owner.kind, External):
            return ()
        return ()

    def _enter_all(
        self,
        value: Object,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
    ) -> Held:
        """Call a module, through the checkpoints that are around it."""
        around = [*value.around, *self._waiting(value)]

        def enter(number: int) -> Held:
            if number < 0:
                return self._body(value, arguments, keywords, node, frame)
            site, when = around[number]
            return self._inside(site, when, lambda: enter(number - 1))

        return enter(len(around) - 1)

    def _waiting(self, value: Object) -> list[tuple[CheckpointSite, Conditions]]:
        """What wraps it, of the wrappers that are applied to models that are not known."""
        if not self._everywhere or not isinstance(value.kind, Kind):
            return []
        kept, self._everywhere = self._everywhere, []
        around, value.around = value.around, []
        for check, wrap, call, frame, conditions in kept:
            stranger = Object(External(""))
            told = truth(self._call(check, [one(stranger)], {}, call, frame))
            if told is not True and truth(self._call(check, [one(value)], {}, call, frame)):
                before, self._conditions = self._conditions, conditions
                self._wrap(value, wrap, call, frame, check)
                self._conditions = before
        found, value.around, self._everywhere = value.around, around, kept
        return found

    def _body(
        self,
        value: Object,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
        *,
        own: bool = True,
    ) -> Held:
        if isinstance(value.kind, Kind):
            for name in ("__call__", "forward") if own else ("forward",):
                held = value.attributes.get(name) or self._attribute(value, name)
                if held:
                    return self._call(held, arguments, keywords, node, frame)
        elif "forward" in value.attributes:
            return self._call(value.attributes["forward"], arguments, keywords, node, frame)
        if value.items and isinstance(value.kind, Kind | External):
            for item in value.items:
                self._call(item, arguments, {}, node, frame)
            return ()
        if isinstance(value.kind, External):
            self._keeps(None if value.kind.last.startswith(_KEEPS_NOTHING) else True)
        return ()

    # --- checkpoints

    def _inside(self, site: CheckpointSite, when: Conditions, body: Callable[[], Held]) -> Held:
        conditions = self._conditions | when
        if self._without_gradient or contradict(conditions):
            return body()
        kept, self._conditions = self._conditions, conditions
        met = None
        if self._regions and self._regions[-1].site != site:
            outer = self._regions[-1]
            self._keeps(True)
            met = Nested(outer.site, site, conditions, self._loops > outer.loops)
            self.nested.append(met)
        self._regions.append(Region(site, self._loops, []))
        held = body()
        self._regions.pop()
        if met is not None:
            self._regions[-1].met.append(met)
        self._conditions = kept
        return held

    def _keeps(self, anything: bool | None) -> None:
        """What runs here keeps something for the backward pass, or may."""
        for region in self._regions:
            for met in region.met:
                if met.followed is not True:
                    met.followed = anything

    def _place(self, node: ast.Call, frame: Frame, argument: ast.expr | None) -> tuple[str, int]:
        """Where the script says what is checkpointed: outside of helpers that are given it."""
        place = (frame.file, node.lineno)
        for _ in range(_DEEPEST):
            owner = frame.owner(argument.id) if isinstance(argument, ast.Name) else None
            if owner is None or owner.caller is None or owner.function is None:
                break
            if argument.id not in owner.given:  # type: ignore[union-attr]
                break
            argument = owner.given[argument.id]  # type: ignore[union-attr]
            frame, line = owner.caller
            if not line:
                break
            place = (frame.file, line)
        return place

    def _external(
        self,
        value: External,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call,
        frame: Frame,
    ) -> Held:
        name, last = value.name, value.last
        seen = next((end for end in _SEEN if name == end or name.endswith(f".{end}")), None)
        if seen in _CALLS and arguments:
            return self._checkpoint(seen, arguments, keywords, node, frame)
        if seen in _WRAPPERS and (arguments or "module" in keywords):
            wrapped = arguments[0] if arguments else keywords["module"]
            variant = _WRAPPERS[seen]
            for chosen, _ in keywords.get("checkpoint_impl", ()):
                ends = isinstance(chosen, External) and chosen.last
                variant = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}.get(
                    ends or "", "unknown"
                )
            if "context_fn" not in keywords:
                file, line = self._place(node, frame, node.args[0] if node.args else None)
                for each, when in wrapped:
                    if isinstance(each, Object):
                        site = CheckpointSite(file, line, variant, _called(each))
                        each.around.append((site, self._conditions | when))
                        self._changes += 1
            return wrapped
        if last in _APPLIES and name.startswith(("torch", ".")):
            return self._applied(arguments, keywords, node, frame)
        if last == "FSDPStrategy" and "activation_checkpointing_policy" in keywords:
            policy = keywords["activation_checkpointing_policy"]
            self._everywhere.append((policy, (), node, frame, self._conditions))
            return ()
        if last == "set_checkpoint_early_stop":
            self.early_stop_off |= bool(arguments) and truth(arguments[0]) is False
        return self._builtin(value, arguments, keywords, node, frame)

    def _checkpoint(
        self,
        name: str,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call,
        frame: Frame,
    ) -> Held:
        variant = _CALLS[name][1]
        chosen = keywords.pop("use_reentrant", None)
        if chosen is not None:
            known = truth(chosen, self._conditions)
            variant = {True: "reentrant", False: "non-reentrant", None: "unknown"}[known]
            if any(isinstance(v, Constant) and v.value is None for v, _ in chosen):
                variant = "reentrant"
        written = node.args[0] if node.args else None
        file, line = self._place(node, frame, written)
        called = {_called(value) for value, _ in arguments[0]}
        around = called.pop() if len(called) == 1 else _written(written) if written else ""
        rest = {k: v for k, v in keywords.items() if k not in ("preserve_rng_state", "debug")}

        def body() -> Held:
            return self._call(arguments[0], arguments[1:], rest, node, frame)

        if "context_fn" in keywords:
            return body()
        return self._inside(CheckpointSite(file, line, variant, around), NONE, body)

    def _applied(
        self,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call,
        frame: Frame,
    ) -> Held:
        """``apply_activation_checkpointing`` and what is like it."""
        places = dict(zip(("model", "checkpoint_wrapper_fn", "check_fn"), arguments, strict=False))
        wrap = keywords.get("checkpoint_wrapper_fn", places.get("checkpoint_wrapper_fn", ()))
        policy = keywords.get("auto_wrap_policy", ())
        check = keywords.get("check_fn", places.get("check_fn", policy))
        model = places.get("model", keywords.get("model", ()))
        if not check:
            return ()
        known = [(value, when) for value, when in model if isinstance(value, Object)]
        if not known:
            self._everywhere.append((check, wrap, node, frame, self._conditions))
        for value, when in known:
            for each in value.below():
                chosen = self._chosen(check, each, node, frame)
                if chosen is False:
                    continue
                kept = self._conditions
                self._conditions |= when
                if chosen is None:
                    doubt = frozenset({f"check_fn takes {_called(each)}"})
                    self._conditions |= {(doubt, True)}
                self._wrap(each, wrap, node, frame, check)
                self._conditions = kept
        return ()

    def _chosen(self, check: Held, each: Object, node: ast.Call, frame: Frame) -> bool | None:
        kinds = self._classes(check)
        if kinds and not any(isinstance(value, Function) for value, _ in check):
            found = {self._is(each, kind) for kind in kinds}
            return True if True in found else None if None in found else False
        if not isinstance(each.kind, Kind) and each.kind.last in ("list", "dict", "enumerate"):
            return False
        told = self._call(check, [one(each)], {}, node, frame)
        return truth(told, self._conditions) if _constant(told) else None

    def _classes(self, held: Held, depth: int = 0) -> list[Kind | External]:
        """The classes in a policy, whatever it is made of."""
        found: list[Kind | External] = []
        for value, _ in held if depth < 5 else ():
            if isinstance(value, Kind) or (
                isinstance(value, External) and value.last[:1].isupper()
            ):
                found.append(value)
            elif isinstance(value, Object | Partial):
                inner = (
                    (*value.items, *value.attributes.values())
                    if isinstance(value, Object)
                    else (*value.arguments, *value.keywords.values())
                )
                found += [kind for each in inner for kind in self._classes(each, depth + 1)]
        return found

    def _wrap(self, each: Object, wrap: Held, node: ast.Call, frame: Frame, check: Held) -> None:
        place = (frame.file, node.lineno)
        before = len(each.around)
        if wrap:
            self._call(wrap, [one(each)], {}, node, frame)
        else:
            each.around.append((CheckpointSite(*place, "non-reentrant", ""), self._conditions))
            self._changes += 1
        kinds = self._classes_asked(check)
        each.around[before:] = [
            (CheckpointSite(*place, site.variant, _called(each), kinds == 1), when)
            for site, when in each.around[before:]
        ]

    def _classes_asked(self, check: Held) -> int:
        """How many classes a ``check_fn`` or a policy names."""
        names = set()
        for value, _ in check:
            if isinstance(value, Function):
                for node in ast.walk(value.node):
                    if isinstance(node, ast.Call) and _written(node.func) == "isinstance":
                        kinds = node.args[1:]
                        if kinds and isinstance(kinds[0], ast.Tuple):
                            kinds = kinds[0].elts
                        names |= {_written(kind) for kind in kinds}
        return len(names) or len(self._classes(check))

    def _is(self, value: Value, kind: Value) -> bool | None:
        """``isinstance``."""
        if isinstance(kind, Object):
            found = {self._is(value, each) for each, _ in elements(one(kind))}
            return True if True in found else None if None in found or not found else False
        if not isinstance(value, Object):
            return None
        if isinstance(value.kind, Kind):
            for each in value.kind.order():
                if each is kind:
                    return True
                if not isinstance(each, External) or not isinstance(kind, External):
                    continue
                if each.name == kind.name or kind.name.endswith("nn.Module"):
                    return True
            return False
        if isinstance(kind, External):
            if value.kind.name == kind.name:
                return True
            # torch's own layers are no kind of each other, as far as is asked here.
            own = value.kind.name.startswith(_LAYERS) and kind.name.startswith(_LAYERS)
            return False if own and kind.last != "Module" else None
        return False

    # --- Python's and torch's own

    def _builtin(
        self,
        value: External,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call,
        frame: Frame,
    ) -> Held:
        name, last = value.name, value.last
        first = arguments[0] if arguments else ()
        if name in _TRUE or name in _FALSE:
            return one(Constant(name in _TRUE))
        if last in ("no_grad", "inference_mode", "wraps"):
            return one(value)
        if name.endswith("no_grad") or last == "identity":
            return first
        if last == "partial" and first:
            return tuple(
                (Partial(each, tuple(arguments[1:]), keywords, node, frame), when)
                for each, when in first
            )
        if name == "super":
            return self._super(frame)
        if name in ("isinstance", "issubclass") and len(arguments) == 2:
            found = {self._is(each, kind) for each, _ in first for kind, _ in arguments[1]}
            known = found.pop() if len(found) == 1 else None
            return () if known is None else one(Constant(known))
        if name == "type" and len(arguments) == 1:
            return tuple((each.kind, when) for each, when in first if isinstance(each, Object))
        if name in ("getattr", "setattr", "hasattr") and len(arguments) > 1:
            return self._by_name(name, arguments)
        if name in ("enumerate", "zip"):
            items = [elements(held) for held in arguments]
            return sequence([sequence([(), *items] if name == "enumerate" else items)])
        if name in ("list", "tuple", "reversed", "iter", "sorted", "set", "next"):
            return elements(first) if name == "next" else first
        if name == "map" and len(arguments) == 2:
            return sequence([self._call(first, [elements(arguments[1])], {}, node, frame)])
        if last == "deepcopy":
            return tuple(
                (_copied(each, {}) if isinstance(each, Object) else each, when)
                for each, when in first
            )
        if last in ("ModuleList", "Sequential", "ModuleDict"):
            given = arguments if last == "Sequential" else [elements(first)] if first else []
            if last == "ModuleList":
                given = [
                    under(item, when)
                    for each, when in first
                    if isinstance(each, Object)
                    for item in each.items or each.attributes.values()
                ]
            return one(Object(External(name), items=given))
        return self._passed(value, arguments, keywords)

    def _passed(self, value: External, arguments: list[Held], keywords: dict[str, Held]) -> Held:
        """What a library's function gives back: what it is given, around which it may be."""
        passed = pooled(
            tuple(
                (each, when)
                for each, when in held
                if isinstance(each, Function | Method | Partial)
                or (isinstance(each, Object) and isinstance(each.kind, Kind))
            )
            for held in (*arguments, *keywords.values())
        )
        last = value.last
        if last[:1].isupper() and any(c.islower() for c in last):
            if passed and not last.endswith("Policy"):
                return passed
            return one(Object(External(value.name), dict(keywords), list(arguments)))
        self._keeps(None)
        return passed

    def _super(self, frame: Frame) -> Held:
        at: Frame | None = frame
        while at is not None:
            function = at.function
            if function is not None and function.kind and not isinstance(function.node, ast.Lambda):
                places = function.node.args.args
                held = at.names.get(places[0].arg, ()) if places else ()
                return tuple(
                    (Parent(each, function.kind), when)
                    for each, when in held
                    if isinstance(each, Object)
                )
            at = at.outer
        return ()

    def _by_name(self, name: str, arguments: list[Held]) -> Held:
        keys = [each.value for each, _ in arguments[1] if isinstance(each, Constant)]
        key = str(keys[0]) if len(keys) == 1 else None
        found = []
        for owner, when in arguments[0]:
            if name == "setattr" and len(arguments) > 2:
                if key is not None:
                    self._set(owner, key, under(arguments[2], when))
                continue
            if key is None or not isinstance(owner, Object):
                return elements(arguments[0]) if key is None and name == "getattr" else ()
            held = self._attribute(owner, key)
            if name == "hasattr":
                found.append(one(Constant(True)) if held else ())
            else:
                found.append(held or (arguments[2] if len(arguments) > 2 else ()))
        return pooled(found)


def _constant(held: Held) -> bool:
    return all(isinstance(value, Constant) for value, _ in held)


def _same(value: Value) -> object:
    return repr(value.value) if isinstance(value, Constant) else value


def _written(node: ast.AST) -> str:
    with suppress(RecursionError):
        return " ".join(ast.unparse(node).split())[:200]
    return "?"


def _called(value: Value) -> str:
    """What a person calls it."""
    if isinstance(value, Object):
        return value.kind.name if isinstance(value.kind, Kind) else value.kind.last
    if isinstance(value, Method):
        owner = f"{_called(value.owner)}." if isinstance(value.owner, Object) else ""
        return owner + getattr(value.function.node, "name", "lambda")
    if isinstance(value, Function):
        return getattr(value.node, "name", "lambda")
    if isinstance(value, Partial):
        return _called(value.target)
    return getattr(value, "name", "")


def _copied(value: Object, done: dict[int, Object]) -> Object:
    if id(value) in done:
        return done[id(value)]
    made = done[id(value)] = Object(value.kind, around=list(value.around), vague=value.vague)

    def copy(held: Held) -> Held:
        return tuple(
            (_copied(each, done) if isinstance(each, Object) else each, when) for each, when in held
        )

    made.attributes = {name: copy(held) for name, held in value.attributes.items()}
    made.items = [copy(held) for held in value.items]
    return made
