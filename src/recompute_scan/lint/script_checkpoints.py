"""Which checkpoints are reached from within others.

Whatever calls whatever, a checkpoint that is met while another's function is walked is inside it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from recompute_scan.lint.script_calls import Calls
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
    Nested,
    Object,
    Partial,
    Region,
    all_constant,
    called,
    contradict,
    one,
    truth,
    written,
)

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
_SEEN = {**_CALLS, **_WRAPPERS}
_DEEPEST = 40


class Checkpoints(Calls):
    """A walk that notes the checkpoints it meets inside others."""

    def _enter_all(
        self,
        value: Object,
        arguments: list[Held],
        keywords: dict[str, Held],
        node: ast.Call | None,
        frame: Frame,
    ) -> Held:
        """Call a module, through the checkpoints that are around it."""
        around = list(value.around)

        def enter(number: int) -> Held:
            if number < 0:
                return self._body(value, arguments, keywords, node, frame)
            site, when = around[number]
            return self._inside(site, when, lambda: enter(number - 1))

        return enter(len(around) - 1)

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
                        site = CheckpointSite(file, line, variant, called(each))
                        each.around.append((site, self._conditions | when))
                        self._changes += 1
            return wrapped
        if last in _APPLIES and name.startswith(("torch", ".")):
            return self._applied(arguments, keywords, node, frame)
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
        first = node.args[0] if node.args else None
        file, line = self._place(node, frame, first)
        several = {called(value) for value, _ in arguments[0]}
        around = several.pop() if len(several) == 1 else written(first) if first else ""
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
        for value, when in known:
            for each in value.below():
                chosen = self._chosen(check, each, node, frame)
                if chosen is False:
                    continue
                kept = self._conditions
                self._conditions |= when
                if chosen is None:
                    doubt = frozenset({f"check_fn takes {called(each)}"})
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
        return truth(told, self._conditions) if all_constant(told) else None

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
            (CheckpointSite(*place, site.variant, called(each), kinds == 1), when)
            for site, when in each.around[before:]
        ]

    def _classes_asked(self, check: Held) -> int:
        """How many classes a ``check_fn`` or a policy names."""
        names = set()
        for value, _ in check:
            if isinstance(value, Function):
                for node in ast.walk(value.node):
                    if isinstance(node, ast.Call) and written(node.func) == "isinstance":
                        kinds = node.args[1:]
                        if kinds and isinstance(kinds[0], ast.Tuple):
                            kinds = kinds[0].elts
                        names |= {written(kind) for kind in kinds}
        return len(names) or len(self._classes(check))
