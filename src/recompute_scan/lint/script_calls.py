"""Calls: of the script's functions and classes, and of Python's and torch's own."""

from __future__ import annotations

import ast

from msgspec.structs import replace

from recompute_scan.lint.statements import Statements
from recompute_scan.lint.values import (
    NONE,
    Call,
    Constant,
    External,
    Frame,
    Function,
    Held,
    Kind,
    Method,
    Object,
    Parent,
    Partial,
    Value,
    contradict,
    copied,
    elements,
    identity,
    one,
    pooled,
    sequence,
    under,
)

_TRUE = {"torch.is_grad_enabled"}
_FALSE = {"torch.jit.is_scripting", "torch.jit.is_tracing", "torch.compiler.is_compiling"}
_SAME = set(
    "to cuda cpu train eval half bfloat16 float double requires_grad_ compile to_empty".split()
)
_ADDS = {"append", "extend", "insert", "add_module", "register_module", "add", "update"}
_PAIRS = {"named_children", "named_modules", "items"}
_ALL = {"modules", "named_modules"}
_HELD = {"children", "values", *_PAIRS, *_ALL}
# Calls of these keep nothing for the backward pass.
_KEEPS_NOTHING = ("Dropout", "Identity", "Flatten", "Unflatten", "DropPath")
_LAYERS = ("torch.nn.", "nn.")
_DEEPEST = 40


class Calls(Statements):
    """A walk that enters the functions, classes and modules that are called."""

    # --- functions, classes and properties

    def _on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        frame.names[node.name] = self._function(node, frame)

    _on_asyncfunctiondef = _on_functiondef

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame, kind: Kind | None = None
    ) -> Held:
        decorators = [self.value(each, frame) for each in node.decorator_list]
        names = {
            value.last for held in decorators for value, _ in held if isinstance(value, External)
        }
        held = one(Function(node, frame, kind, frozenset(names)))
        for decorator in reversed(decorators):
            if decorator and not isinstance(decorator[0][0], External):
                place = ast.Call(ast.Name(node.name), [], [], lineno=node.lineno)
                held = self._call(decorator, Call([held], {}, place, frame)) or held
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

    def _on_attribute(self, node: ast.Attribute, frame: Frame) -> Held:
        held = self._attributes(self.value(node.value, frame), node.attr)
        for value, _ in held:
            if isinstance(value, Method) and value.function.decorators & {"property"}:
                return self.call_whole(value, frame)
        return held

    # --- calls

    def call_whole(self, value: Value, frame: Frame) -> Held:
        """Call it with arguments that are not known."""
        place = ast.Call(ast.Name(""), [], [], lineno=0)
        return self._call(one(value), Call([], {}, place, frame))

    def make(self, kind: Kind, frame: Frame) -> Object:
        """An object of a class, made with arguments that are not known."""
        made = self.call_whole(kind, frame)
        return next(value for value, _ in made if isinstance(value, Object))

    def _on_call(self, node: ast.Call, frame: Frame) -> Held:
        func = node.func
        owners = self.value(func.value, frame) if isinstance(func, ast.Attribute) else ()
        arguments = self._flat(node.args, frame)
        keywords = {
            "**" if each.arg is None else each.arg: self.value(each.value, frame)
            for each in node.keywords
        }
        call = Call(arguments, keywords, node, frame)
        if not isinstance(func, ast.Attribute):
            return self._call(self.value(func, frame), call)
        found = []
        for owner, when in owners:
            held = self._attribute(owner, func.attr)
            if held:
                found.append(self._call(under(held, when), call))
            elif isinstance(owner, Object | Parent):
                found.append(self._unknown(owner, func.attr, call))
            elif isinstance(owner, Partial) and func.attr == "func":
                found.append(one(owner.target))
        return pooled(found)

    def _call(self, held: Held, call: Call) -> Held:
        """The values that the call gives back."""
        found = []
        kept = self._conditions
        for value, when in held:
            self._conditions = kept | when
            if not contradict(self._conditions):
                found.append(under(self._apply(value, call), when))
        self._conditions = kept
        return pooled(found)

    def _apply(self, value: Value, call: Call) -> Held:
        self._step()
        if isinstance(value, Function):
            return self._run(value, call)
        if isinstance(value, Method):
            return self._run(
                value.function, replace(call, arguments=[one(value.owner), *call.arguments])
            )
        if isinstance(value, Partial):
            node, frame = call.node, call.frame
            if isinstance(value.target, External):
                # A library's function is called where the script says with what.
                made = value.call
                node, frame = (
                    ast.Call(made.func, made.args[1:], [], lineno=made.lineno),
                    value.frame,
                )
            given = [*value.arguments, *call.arguments]
            keywords = {**value.keywords, **call.keywords}
            return self._apply(value.target, Call(given, keywords, node, frame))
        if isinstance(value, Kind):
            return self._make(value, call)
        if isinstance(value, Object):
            return self._enter(value, call)
        return self._external(value, call) if isinstance(value, External) else ()

    def _run(self, function: Function, call: Call) -> Held:
        node = function.node
        self.walked.add(id(node))
        inside = Frame(function.frame.file, {}, function.frame, function)
        inside.caller = (call.frame, call.node.lineno)
        self._parameters(function, inside, call)
        if self._depth > _DEEPEST:
            return ()
        key = (
            function.node,
            function.frame,
            tuple(
                (name, tuple((identity(value), when) for value, when in held))
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
                held = ()  # one of the values that it returns is not known
        self._depth -= 1
        self._conditions, self._without_gradient = kept
        self._done[key] = held
        return held

    def _parameters(self, function: Function, inside: Frame, call: Call) -> None:
        given, arguments, keywords = function.node.args, call.arguments, call.keywords
        places = [*given.posonlyargs, *given.args]
        names = [each.arg for each in places]
        # With ``**`` in the call, a parameter that it does not name may be given all the same.
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
        args = call.node.args
        if not any(isinstance(each, ast.Starred) for each in args):
            written = dict(zip(names[len(arguments) - len(args) :], args, strict=False))
            written.update({each.arg: each.value for each in call.node.keywords if each.arg})
            inside.given = written

    def _make(self, kind: Kind, call: Call) -> Held:
        made = Object(kind, vague="**" in call.keywords)
        self.made.append(made)
        begin = kind.find("__init__")
        if begin:
            methods = tuple((self._bound(value, made), when) for value, when in begin)
            self._call(methods, call)
        else:
            made.items += call.arguments
            made.attributes.update({k: held for k, held in call.keywords.items() if k != "**"})
        return one(made)

    def _unknown(self, owner: Object | Parent, name: str, call: Call) -> Held:
        """A method that no file defines, of torch's modules or Python's own."""
        if isinstance(owner, Parent):
            if name == "__init__":
                owner.owner.items += call.arguments
            elif name in ("__call__", "forward"):
                return self._body(owner.owner, call, own=False)
            return ()
        if name in _SAME:
            return one(owner)
        if name in _ADDS:
            given = call.arguments
            given = given[-1:] if name != "extend" else [elements(each) for each in given]
            owner.items += [under(each, self._conditions) for each in given]
            self._changes += 1
        elif name in _HELD:
            parts = owner.below() if name in _ALL else list(owner.parts())
            items = tuple((each, NONE) for each in parts)
            return sequence([sequence([(), items]) if name in _PAIRS else items])
        elif name == "apply" and call.arguments:
            for each in (*owner.below(), owner):
                self._call(call.first, call.of(one(each)))
            return one(owner)
        return ()

    def _enter(self, value: Object, call: Call) -> Held:
        """Call a module, through the checkpoints that are around it."""
        around = list(value.around)

        def enter(number: int) -> Held:
            if number < 0:
                return self._body(value, call)
            site, when = around[number]
            return self._inside(site, when, lambda: enter(number - 1))

        return enter(len(around) - 1)

    def _body(self, value: Object, call: Call, *, own: bool = True) -> Held:
        if isinstance(value.kind, Kind):
            for name in ("__call__", "forward") if own else ("forward",):
                held = value.attributes.get(name) or self._attribute(value, name)
                if held:
                    return self._call(held, call)
        elif "forward" in value.attributes:
            return self._call(value.attributes["forward"], call)
        if value.items and isinstance(value.kind, Kind | External):
            for item in value.items:
                self._call(item, call.of(*call.arguments))
            return ()
        if isinstance(value.kind, External):
            self._keeps(None if value.kind.last.startswith(_KEEPS_NOTHING) else True)
        return ()

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
            # No layer of torch is a subclass of another, as far as scripts ask.
            own = value.kind.name.startswith(_LAYERS) and kind.name.startswith(_LAYERS)
            return False if own and kind.last != "Module" else None
        return False

    # --- Python's and torch's own

    def _external(self, value: External, call: Call) -> Held:
        """Call a function that no file defines."""
        name, last, arguments, first = value.name, value.last, call.arguments, call.first
        if name in _TRUE or name in _FALSE:
            return one(Constant(name in _TRUE))
        if last in ("no_grad", "inference_mode", "wraps"):
            return one(value)
        if name.endswith("no_grad") or last == "identity":
            return first
        if last == "partial" and first:
            return tuple(
                (Partial(each, tuple(arguments[1:]), call.keywords, call.node, call.frame), when)
                for each, when in first
            )
        if name == "super":
            return self._super(call.frame)
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
            return sequence([self._call(first, call.of(elements(arguments[1])))])
        if last == "deepcopy":
            return tuple(
                (copied(each, {}) if isinstance(each, Object) else each, when)
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
        return self._passed(value, call)

    def _passed(self, value: External, call: Call) -> Held:
        """A library's function gives the modules and functions back that it got, maybe wrapped."""
        passed = pooled(
            tuple(
                (each, when)
                for each, when in held
                if isinstance(each, Function | Method | Partial)
                or (isinstance(each, Object) and isinstance(each.kind, Kind))
            )
            for held in (*call.arguments, *call.keywords.values())
        )
        last = value.last
        if last[:1].isupper() and any(c.islower() for c in last):
            if passed and not last.endswith("Policy"):
                return passed
            return one(Object(value, dict(call.keywords), list(call.arguments)))
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
