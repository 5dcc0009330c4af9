"""Which checkpoints are reached from within others.

A checkpoint that is met while the function of another is walked is inside it.
"""

from __future__ import annotations

import ast

from recompute_scan.lint.script_calls import Calls
from recompute_scan.lint.values import (
    NONE,
    Call,
    CheckpointSite,
    Constant,
    External,
    Function,
    Held,
    Kind,
    Object,
    Partial,
    all_constant,
    called,
    one,
    truth,
    written,
)

# Functions that checkpoint what they call; reentrant where ``use_reentrant`` is not passed.
_CALLS = {
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.checkpoint_sequential",
    "torch.utils.checkpoint.CheckpointFunction.apply",
    "deepspeed.checkpointing.checkpoint",
    "activation_checkpointing.checkpointing.checkpoint",
    "megatron.core.tensor_parallel.checkpoint",
    "transformer_engine.pytorch.checkpoint",
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
_IMPLEMENTATIONS = {"REENTRANT": "reentrant", "NO_REENTRANT": "non-reentrant"}
_DEEPEST = 40


class Checkpoints(Calls):
    """A walk that notes the checkpoints it meets inside others."""

    def _enter(self, value: Object, call: Call) -> Held:
        """Call a module, through the checkpoints that are around it."""
        around = list(value.around)

        def enter(number: int) -> Held:
            if number < 0:
                return self._body(value, call)
            site, when = around[number]
            return self._inside(site, when, lambda: enter(number - 1))

        return enter(len(around) - 1)

    def _place(self, call: Call) -> tuple[str, int]:
        """Where the script names the checkpointed module: outside of helpers that get it passed."""
        frame, place = call.frame, (call.frame.file, call.node.lineno)
        argument: ast.expr | None = call.node.args[0] if call.node.args else None
        for _ in range(_DEEPEST):
            name = argument.id if isinstance(argument, ast.Name) else ""
            owner = frame.owner(name)
            if owner is None or owner.caller is None or name not in owner.given:
                break
            argument = owner.given[name]
            frame, line = owner.caller
            if not line:
                break
            place = (frame.file, line)
        return place

    def _external(self, value: External, call: Call) -> Held:
        name, last = value.name, value.last
        seen = next((n for n in (*_CALLS, *_WRAPPERS) if name == n or name.endswith(f".{n}")), "")
        wrapped = call.first or call.keywords.get("module", ())
        if seen in _CALLS and call.arguments:
            return self._checkpoint(call)
        if seen in _WRAPPERS and (call.arguments or "module" in call.keywords):
            return self._wrapper(wrapped, _WRAPPERS[seen], call)
        if last in _APPLIES and name.startswith(("torch", ".")):
            return self._applied(call)
        if last == "set_checkpoint_early_stop":
            self.early_stop_off |= truth(call.first) is False
        return super()._external(value, call)

    def _wrapper(self, wrapped: Held, variant: str, call: Call) -> Held:
        for chosen, _ in call.keywords.get("checkpoint_impl", ()):
            last = chosen.last if isinstance(chosen, External) else ""
            variant = _IMPLEMENTATIONS.get(last, "unknown")
        if "context_fn" not in call.keywords:
            for each, when in wrapped:
                if isinstance(each, Object):
                    site = CheckpointSite(*self._place(call), variant, called(each))
                    each.around.append((site, self._conditions | when))
                    self._changes += 1
        return wrapped

    def _checkpoint(self, call: Call) -> Held:
        variant, keywords, target = "reentrant", dict(call.keywords), call.first
        chosen = keywords.pop("use_reentrant", None)
        if chosen is not None and not any(
            isinstance(value, Constant) and value.value is None for value, _ in chosen
        ):
            known = truth(chosen, self._conditions)
            variant = {True: "reentrant", False: "non-reentrant", None: "unknown"}[known]
        first = call.node.args[0] if call.node.args else None
        several = {called(value) for value, _ in target}
        around = several.pop() if len(several) == 1 else written(first) if first else ""
        rest = {k: v for k, v in keywords.items() if k not in ("preserve_rng_state", "debug")}

        def body() -> Held:
            return self._call(target, Call(call.arguments[1:], rest, call.node, call.frame))

        if "context_fn" in keywords:
            return body()
        return self._inside(CheckpointSite(*self._place(call), variant, around), NONE, body)

    def _applied(self, call: Call) -> Held:
        """``apply_activation_checkpointing`` and functions like it."""
        given = dict(
            zip(("model", "checkpoint_wrapper_fn", "check_fn"), call.arguments, strict=False)
        )
        given.update(call.keywords)
        check = given.get("check_fn", given.get("auto_wrap_policy", ()))
        for value, when in given.get("model", ()) if check else ():
            for each in value.below() if isinstance(value, Object) else ():
                chosen = self._chosen(check, each, call)
                if chosen is False:
                    continue
                kept = self._conditions
                self._conditions |= when
                if chosen is None:
                    doubt = frozenset({f"check_fn takes {called(each)}"})
                    self._conditions |= {(doubt, True)}
                self._wrap(each, given.get("checkpoint_wrapper_fn", ()), check, call)
                self._conditions = kept
        return ()

    def _chosen(self, check: Held, each: Object, call: Call) -> bool | None:
        kinds = self._classes(check)
        if kinds and not any(isinstance(value, Function) for value, _ in check):
            found = {self._is(each, kind) for kind in kinds}
            return True if True in found else None if None in found else False
        if not isinstance(each.kind, Kind) and each.kind.last in ("list", "dict", "enumerate"):
            return False
        answer = self._call(check, call.of(one(each)))
        return truth(answer, self._conditions) if all_constant(answer) else None

    def _classes(self, held: Held, depth: int = 0) -> list[Kind | External]:
        """The classes anywhere in a policy."""
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

    def _wrap(self, each: Object, wrap: Held, check: Held, call: Call) -> None:
        place = (call.frame.file, call.node.lineno)
        before = len(each.around)
        if wrap:
            self._call(wrap, call.of(one(each)))
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
