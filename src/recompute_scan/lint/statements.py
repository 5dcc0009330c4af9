"""A script's statements and expressions, walked in order without running it.

A name stands for objects of the classes that the files define, for functions, for constants, or for
nothing where it is not known. Of an unknown condition both arms are walked, and everything found in
an arm depends on the condition. Loops are walked once.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from recompute_scan.lint.values import (
    NONE,
    CheckpointSite,
    Conditions,
    Constant,
    Enough,
    External,
    Frame,
    Function,
    Held,
    Kind,
    Method,
    Module,
    Nested,
    Object,
    Parent,
    Region,
    Value,
    all_constant,
    contradict,
    elements,
    one,
    pooled,
    sequence,
    truth,
    under,
    written,
)

# Attributes that are true in a training.
_TRAINING = {"training", "requires_grad"}
_HANDLERS = {
    kind: f"_on_{kind.__name__.lower()}"
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
_STEPS = 10_000


class Sources:
    """The Python files that were read, found by the names that others import."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.tree = lru_cache(maxsize=200)(lambda path: ast.parse(texts[path]))

    def locate(self, base: str) -> str | None:
        """The file of a module, from its path without a suffix."""
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.texts), None)

    def imported(self, name: str, file: str) -> Module | None:
        """The module that a dotted name with its leading dots stands for in a file."""
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


class Statements:
    """One walk, from the statements of one file on; calls are in :mod:`script_calls`.

    Attributes:
        sources: The files that were read.
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
        self.steps = 0
        self._file = file

    # --- checkpoints

    def _inside(self, site: CheckpointSite, when: Conditions, body: Callable[[], Held]) -> Held:
        """Walk the body as the function of a checkpoint, and note a checkpoint around it."""
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
        """The code here keeps something for the backward pass, or may (``None``)."""
        for region in self._regions:
            for met in region.met:
                if met.followed is not True:
                    met.followed = anything

    # --- the beginning of a walk

    def run(self) -> Frame:
        """Walk the file's own statements; its names."""
        return self._module(self._file, "__main__")

    def _forced(self, held: Held) -> Held:
        """The values of imported names."""
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
            found = self._forced(found)
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
            held = owner.names[name] = self._forced(held)
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
            if alias.name == "*" and found and (file := self.sources.locate(found.base)):
                names = self._module(file).names.items()
                frame.names.update({name: held for name, held in names if name[0] != "_"})

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
            frame_names = {}
            for name in {**with_true, **with_false}:
                one_way, other = with_true.get(name), with_false.get(name)
                if one_way is other and one_way is not None:
                    frame_names[name] = one_way
                else:
                    both = (under(one_way or (), true), under(other or (), false))
                    frame_names[name] = pooled(both)
        names.clear()
        names.update(frame_names)
        return False

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

    # --- conditions

    def _test(self, node: ast.expr, frame: Frame) -> tuple[bool | None, Conditions, Conditions]:
        """Whether it is true, and the conditions under which it is, and under which it is not."""
        self._step()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known, true, false = self._test(node.operand, frame)
            return None if known is None else not known, false, true
        text = frozenset({written(node)})
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
        """The values that an expression may have."""
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

    def _on_lambda(self, node: ast.Lambda, frame: Frame) -> Held:
        return one(Function(node, frame))

    def _on_ifexp(self, node: ast.IfExp, frame: Frame) -> Held:
        known, true, false = self._test(node.test, frame)
        if known is not None:
            return self.value(node.body if known else node.orelse, frame)
        kept, found = self._conditions, []
        for conditions, arm in ((true, node.body), (false, node.orelse)):
            self._conditions = kept | conditions
            if not contradict(self._conditions):
                found.append(under(self.value(arm, frame), conditions))
        self._conditions = kept
        return pooled(found)

    def _on_boolop(self, node: ast.BoolOp, frame: Frame) -> Held:
        found: list[Held] = []
        for part in node.values:
            held = self.value(part, frame)
            known = truth(held, self._conditions)
            if isinstance(part, ast.Call) and not all_constant(held):
                known = None  # more may come back than the values that are known
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

    def _on_list(self, node: ast.List | ast.Tuple | ast.Set, frame: Frame) -> Held:
        return sequence(self._flat(node.elts, frame))

    _on_tuple = _on_set = _on_list

    def _flat(self, nodes: Iterable[ast.expr], frame: Frame) -> list[Held]:
        """The value of each; of one with a star, the value of each part."""
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
