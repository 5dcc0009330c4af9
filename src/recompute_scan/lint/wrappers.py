"""Checkpoints inside others, in one file or across several, as findings."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from recompute_scan.frameworks.base import RUN
from recompute_scan.lint.library_calls import Script
from recompute_scan.lint.python import CHECKPOINTS
from recompute_scan.lint.rules import Found
from recompute_scan.lint.script_checkpoints import Checkpoints
from recompute_scan.lint.statements import Sources
from recompute_scan.lint.values import (
    CheckpointSite,
    Conditions,
    Enough,
    Frame,
    Function,
    Kind,
    Nested,
)
from recompute_scan.result.run_record import source_lines

_WORD = re.compile(r"\w+")
# Of all files, in statements and expressions: some seconds.
_STEPS = 300_000
_FILES_AROUND = 100
_MOST_OBJECTS = 50


class _Pair(Struct):
    """A checkpoint and another inside it, and whether torch's early stop is off."""

    nested: Nested
    early_stop_off: bool


def nested_findings(
    texts: Mapping[str, str], scripts: Mapping[str, Script]
) -> tuple[list[Found], list[str]]:
    """The findings, and the files that were not followed to the end.

    Args:
        texts: The Python files that were read, by their paths.
        scripts: What each of them says.
    """
    names = {posixpath.normpath(Path(path).absolute().as_posix()): path for path in texts}
    sources = Sources({file: texts[path] for file, path in names.items()})
    read = {file: scripts[path] for file, path in names.items()}
    pairs: dict[tuple[CheckpointSite, CheckpointSite], _Pair] = {}
    cut: list[str] = []
    left = _STEPS
    words = frozenset[str]().union(*(script.checkpointing for script in read.values()))
    for file in sorted(read):
        parts = _Parts(sources, file, words)
        if not parts.any or _sites_around(file, sources, read) < 2:
            continue
        if left <= 0:
            cut.append(names[file])
            continue
        walks = _Walks(sources, parts, left)
        for nested, early_stop_off in walks:
            key = (nested.outer, nested.inner)
            kept = pairs.get(key)
            if kept is None or len(nested.conditions) < len(kept.nested.conditions):
                pairs[key] = _Pair(nested, early_stop_off)
        left -= walks.steps
        if walks.cut:
            cut.append(names[file])
    found: dict[tuple[str, int], Found] = {}
    for _, pair in sorted(pairs.items(), key=lambda item: item[0]):
        finding = _finding(pair, names)
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


class _Parts:
    """The functions and methods of a file that checkpoint, or name what does.

    Attributes:
        nodes: Each by its name, or by the names of its class and itself.
        any: Whether there are any, or other statements that do.
    """

    def __init__(self, sources: Sources, file: str, words: frozenset[str]) -> None:
        self.file = file
        self.nodes: dict[tuple[str, ...], ast.stmt] = {}
        text = sources.texts[file]
        self.any = bool(CHECKPOINTS.search(text)) or not words.isdisjoint(_WORD.findall(text))
        if not self.any:
            return
        lines = source_lines(text)

        def concerned(node: ast.stmt) -> bool:
            own = "".join(lines[node.lineno - 1 : node.end_lineno])
            return bool(CHECKPOINTS.search(own)) or not words.isdisjoint(_WORD.findall(own))

        self.any = False
        for node in sources.tree(file).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.nodes |= {(node.name,): node} if concerned(node) else {}
            elif isinstance(node, ast.ClassDef):
                methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
                self.nodes |= {(node.name, m.name): m for m in methods if concerned(m)}
            elif not isinstance(node, ast.Import | ast.ImportFrom):
                self.any = self.any or concerned(node)
        self.any = self.any or bool(self.nodes)


class _Walks:
    """The walks of one file: its statements, then the functions that they did not call."""

    def __init__(self, sources: Sources, parts: _Parts, most: int) -> None:
        self.sources, self.parts, self.file, self.most = sources, parts, parts.file, most
        self.steps = 0
        self.cut = False
        self.walked: set[int] = set()

    def __iter__(self) -> Iterator[tuple[Nested, bool]]:
        yield from self._walk(())
        for way, node in self.parts.nodes.items():
            if id(node) in self.walked:
                continue
            if self.steps >= self.most:
                self.cut = True
                return
            yield from self._walk(way)

    def _walk(self, way: tuple[str, ...]) -> Iterator[tuple[Nested, bool]]:
        follower = Checkpoints(self.sources, self.file)
        try:
            frame = follower.run()
            if way:
                self._call(follower, way, frame)
            kinds = set() if way else {names[0] for names in self.parts.nodes if len(names) > 1}
            _use_what_was_made(follower, frame, kinds)
        except (Enough, RecursionError):
            self.cut = True
        self.steps += follower.steps
        self.walked |= follower.walked
        for nested in follower.nested:
            yield nested, follower.early_stop_off

    def _call(self, follower: Checkpoints, way: tuple[str, ...], frame: Frame) -> None:
        for value, _ in frame.names.get(way[0], ()):
            if isinstance(value, Function):
                follower.call_whole(value, frame)
            elif isinstance(value, Kind):
                made = follower.make(value, frame)
                for method, _ in follower._attribute(made, way[1]):
                    follower.call_whole(method, frame)


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


def _finding(pair: _Pair, names: Mapping[str, str]) -> Found:
    outer, inner, met = pair.nested.outer, pair.nested.inner, pair.nested
    file = names.get(outer.file, outer.file)
    where = f"line {inner.line}"
    if inner.file != outer.file:
        where = f"{names.get(inner.file, inner.file)}:{inner.line}"
    what = f"{outer.around} here" if outer.around else "here"
    inside = f"{inner.around} in {where}, inside it" if inner.around else f"in {where}, inside it"
    fix = (
        "Keep one of the two: call the checkpointed function directly in one place. If this "
        "checkpoint is around several others, removing this one costs the least memory."
    )
    variants = {outer.variant, inner.variant}
    both = variants == {"non-reentrant"}
    doubt = ""
    if "unknown" in variants and "reentrant" not in variants:
        doubt = "if either is reentrant"
    elif both and pair.early_stop_off:
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
