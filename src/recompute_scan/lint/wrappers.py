"""Checkpoints inside others, in one file or across several, as findings.

A checkpoint that is met while the function of another is walked is inside it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from recompute_scan.frameworks.base import RUN
from recompute_scan.lint.library_calls import Script
from recompute_scan.lint.python import CHECKPOINTS
from recompute_scan.lint.rules import Found
from recompute_scan.lint.script_calls import Calls
from recompute_scan.lint.statements import Sources
from recompute_scan.lint.values import (
    NONE,
    Call,
    CheckpointSite,
    Conditions,
    Constant,
    Enough,
    External,
    Frame,
    Function,
    Held,
    Kind,
    Nested,
    Object,
    Partial,
    all_constant,
    called,
    one,
    truth,
    written,
)
from recompute_scan.result.run_record import source_lines

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


_WORD = re.compile(r"\w+")
# Of all files, in statements and expressions: some seconds.
_STEPS = 300_000
_FILES_AROUND = 100
_MOST_OBJECTS = 50


def nested_findings(
    texts: Mapping[str, str], scripts: Mapping[str, Script]
) -> tuple[list[Found], list[str]]:
    """The findings in these Python files, and the files that were not followed to the end."""
    names = {posixpath.normpath(Path(path).absolute().as_posix()): path for path in texts}
    sources = Sources({file: texts[path] for file, path in names.items()})
    read = {file: scripts[path] for file, path in names.items()}
    pairs: dict[tuple[CheckpointSite, CheckpointSite], Nested] = {}
    cut: list[str] = []
    left = _STEPS
    words = frozenset[str]().union(*(script.checkpointing for script in read.values()))
    for file in sorted(read):
        parts = _parts(sources, file, words)
        if not parts or _sites_around(file, sources, read) < 2:
            continue
        if left <= 0:
            cut.append(names[file])
            continue
        walks = _Walks(sources, file, parts, left)
        for nested in walks:
            key = (nested.outer, nested.inner)
            if key not in pairs or len(nested.conditions) < len(pairs[key].conditions):
                pairs[key] = nested
        left -= walks.steps
        if walks.cut:
            cut.append(names[file])
    found: dict[tuple[str, int], Found] = {}
    for _, nested in sorted(pairs.items(), key=lambda item: item[0]):
        finding = _finding(nested, names)
        at = (finding.file, finding.line)
        if at not in found or finding.code < found[at].code:
            found[at] = finding
    return list(found.values()), cut


def _sites_around(file: str, sources: Sources, read: Mapping[str, Script]) -> int:
    """How many checkpoints there are in a file and in those that it imports, up to two."""
    seen, waiting, number = {file}, [file], 0
    while waiting and number < 2 and len(seen) < _FILES_AROUND:
        at = waiting.pop(0)
        number += read[at].checkpoints
        for name in sorted(read[at].imports):
            module = sources.imported(name, at)
            base = module and sources.locate(module.base)
            if base and base not in seen:
                seen.add(base)
                waiting.append(base)
    return number


def _parts(sources: Sources, file: str, words: frozenset[str]) -> dict[tuple[str, ...], ast.stmt]:
    """The functions and methods of a file that checkpoint, or name what does.

    Each is by its name, or by the names of its class and itself; another statement is by no name.
    """

    def concerned(text: str) -> bool:
        return bool(CHECKPOINTS.search(text)) or not words.isdisjoint(_WORD.findall(text))

    text = sources.texts[file]
    if not concerned(text):
        return {}
    lines = source_lines(text)
    found: dict[tuple[str, ...], ast.stmt] = {}
    for node in sources.tree(file).body:
        parts: dict[tuple[str, ...], ast.stmt] = {(): node}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = {(node.name,): node}
        elif isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            parts = {(node.name, method.name): method for method in methods}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            parts = {}
        for way, part in parts.items():
            if concerned("".join(lines[part.lineno - 1 : part.end_lineno])):
                found[way] = part
    return found


class _Walks:
    """The walks of one file: its statements, then the functions that they did not call."""

    def __init__(
        self, sources: Sources, file: str, parts: Mapping[tuple[str, ...], ast.stmt], most: int
    ) -> None:
        self.sources, self.file, self.parts, self.most = sources, file, parts, most
        self.steps = 0
        self.cut = False
        self.walked: set[int] = set()

    def __iter__(self) -> Iterator[Nested]:
        yield from self._walk(())
        for way, node in self.parts.items():
            if not way or id(node) in self.walked:
                continue
            if self.steps >= self.most:
                self.cut = True
                return
            yield from self._walk(way)

    def _walk(self, way: tuple[str, ...]) -> Iterator[Nested]:
        follower = Checkpoints(self.sources, self.file)
        try:
            frame = follower.run()
            for value, _ in frame.names.get(way[0], ()) if way else ():
                if isinstance(value, Function):
                    follower.call_whole(value, frame)
                elif isinstance(value, Kind):
                    made = follower.make(value, frame)
                    for method, _ in follower._attribute(made, way[1]):
                        follower.call_whole(method, frame)
            kinds = set() if way else {names[0] for names in self.parts if len(names) > 1}
            _use_what_was_made(follower, frame, kinds)
        except (Enough, RecursionError):
            self.cut = True
        self.steps += follower.steps
        self.walked |= follower.walked
        for nested in follower.nested:
            nested.early_stop_off = follower.early_stop_off
            yield nested


def _use_what_was_made(follower: Checkpoints, frame: Frame, kinds: set[str]) -> None:
    """Call the modules that the walk made, and one of each class that it may be about."""
    held_by_others = {id(part) for made in follower.made for part in made.parts()}
    for made in follower.made[:_MOST_OBJECTS]:
        if id(made) not in held_by_others:
            follower.call_whole(made, frame)
    for name in list(frame.names):
        if name not in kinds:
            continue
        for value, _ in frame.names[name]:
            if isinstance(value, Kind) and value.find("forward"):
                follower.call_whole(follower.make(value, frame), frame)


def _finding(met: Nested, names: Mapping[str, str]) -> Found:
    outer, inner = met.outer, met.inner
    file = names.get(outer.file, outer.file)
    where = f"line {inner.line}"
    if inner.file != outer.file:
        where = f"{names.get(inner.file, inner.file)}:{inner.line}"
    what = f"{outer.around} here" if outer.around else "here"
    inside = f"{inner.around} in {where}, inside it" if inner.around else f"in {where}, inside it"
    fix = (
        "Keep one of the two, and call the function directly at the other place. If this "
        "checkpoint is around several others, removing this one costs the least memory."
    )
    variants = {outer.variant, inner.variant}
    both = variants == {"non-reentrant"}
    doubt = ""
    if "unknown" in variants and "reentrant" not in variants:
        doubt = "if either is reentrant"
    elif both and met.early_stop_off:
        doubt = "where early stop is off"
    elif both and met.followed is None:
        doubt = "if what follows the inner one keeps anything for the backward pass"
    if met.conditions:
        doubt = f"if {_words(met.conditions)}" + (f", and {doubt}" if doubt else "")
    edit: Literal["", "delete"] = "delete" if outer.alone else ""
    if doubt:
        code, title, edit = "RS602", f"may be checkpointed twice, {doubt}", ""
        why = f"The files alone do not show it. {RUN}"
    elif both and met.followed is False:
        code, title = "RS603", "two checkpoints for one recompute"
        why = (
            "Both are non-reentrant, and the outer one runs nothing after the inner one. So the "
            "code inside is recomputed once today, and twice as soon as either becomes reentrant."
        )
    else:
        code, title = "RS601", "checkpointed twice"
        why = (
            "Both are non-reentrant, but the outer one goes on after the inner one and needs its "
            "output. So the code inside runs twice in the backward pass."
            if both
            else "One of the two is reentrant, so the code inside runs twice in the backward pass."
        )
    return Found(file, outer.line, code, f"{title}: {what}, and {inside}", why, fix, edit)


def _words(conditions: Conditions) -> str:
    """Conditions as a person reads them."""
    written = sorted(
        " and ".join(sorted(texts)) if holds else f"not ({' and '.join(sorted(texts))})"
        for texts, holds in conditions
    )
    more = f", and {len(written) - 3} more" if len(written) > 3 else ""
    return " and ".join(f"`{text}`" for text in written[:3]) + more
