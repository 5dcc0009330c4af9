"""Selective policies as they decide.

torch asks a policy from inside a dispatch mode that it makes for each call of the checkpoint, and
recomputes through a second one. For that step the two modes' classes carry wrappers; every
policy is called there, whoever made the modes. The step's times are never used, so that looking
costs no figure anything. A policy gets the arguments that torch gives it, once, and its result or
exception goes on unchanged.

Nothing of the script's is called: closures, globals, defaults and attributes are read, and the
bytecode is searched for operators that it spells out, such as ``torch.ops.aten.mm``.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from msgspec import Struct, field
from msgspec.structs import asdict
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace, _Ops
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from recompute_scan.annotations import RegionAnnotation
from recompute_scan.crash import code_of
from recompute_scan.files import content
from recompute_scan.record.attribution import CallSites, site_folder
from recompute_scan.record.isolation import Call, Guard, Patches
from recompute_scan.record.origins import COMPILER_MODULE
from recompute_scan.record.region_ranges import Within
from recompute_scan.record.torch_versions import compiled_something
from recompute_scan.result.fidelity import (
    DecidedOperator,
    EntryKind,
    Policies,
    PolicyEntry,
    WatchedPolicy,
)

# The policy that torch makes of a list, and the name it knows the list by.
_OF_A_LIST = "create_selective_checkpoint_contexts.<locals>.policy_fn"
_LIST = "policy_fn_or_list"
_MOST = 1000
_CHAIN = ("LOAD_ATTR", "LOAD_METHOD")
_ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FROM_DICT_OR_DEREF")


class ListedEntry(NamedTuple):
    """An operator that a policy names, in which collection, and how often it is in there."""

    operator: Any
    kind: EntryKind
    collection: str
    times: int

    @property
    def name(self) -> str:
        """Such as ``aten.mm.default``."""
        return str(self.operator) if self.kind != "other" else named(self.operator)

    def is_of(self, operator: object) -> bool:
        """Is the called operator this one, or one of its overloads?"""
        if self.kind == "packet":
            return getattr(operator, "overloadpacket", None) is self.operator
        return operator is self.operator


class EntriesOfPolicy(NamedTuple):
    """A policy as the script has it.

    ``code`` is where it is defined, ``None`` for a list and for what is written in C; ``key`` is
    the same for policies that are made anew for each layer.
    """

    name: str
    code: CodeType | None
    entries: tuple[ListedEntry, ...]
    key: object


def named(operator: object) -> str:
    """The name of an operator, or of a function in its place."""
    if isinstance(operator, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return str(operator)
    name = getattr(operator, "__name__", None)
    return name if isinstance(name, str) else type(operator).__name__


def describe_policy(policy: Any) -> EntriesOfPolicy:
    """A description of a policy, made without calling it."""
    function, given = _unwrapped(policy)
    code = code_of(function)
    name = getattr(function, "__qualname__", None)
    if not isinstance(name, str):
        name = type(function).__qualname__
    if name == _OF_A_LIST and inspect.isfunction(function):
        members = inspect.getclosurevars(function).nonlocals.get(_LIST)
        if isinstance(members, list):
            entries = tuple(_members("the list", members))
            name = f"a list of {len(members)} operator{'s' * (len(members) != 1)}"
            return EntriesOfPolicy(name, None, entries, ("list", *map(named, members)))
    entries = tuple(_entries(function, given))[:_MOST]
    where = code if code is not None else name
    return EntriesOfPolicy(
        name, code, entries, (where, *((one.name, one.collection) for one in entries))
    )


def _unwrapped(policy: Any) -> tuple[Any, dict[str, Any]]:
    given: dict[str, Any] = {}
    for _ in range(20):
        if isinstance(policy, functools.partial):
            given |= {f"argument {n}": value for n, value in enumerate(policy.args, 1)}
            given |= policy.keywords
            policy = policy.func
        elif inspect.isfunction(policy) and "__wrapped__" in vars(policy):
            policy = vars(policy)["__wrapped__"]
        else:
            break
    return policy, given


def _entries(function: Any, given: dict[str, Any]) -> Iterator[ListedEntry]:
    variables = {**_variables(function), **given}
    for name, value in list(variables.items()):
        if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) <= _MOST:
            yield from _members(name, value)
    code = code_of(function)
    if code is not None:
        yield from _members("the code", _spelled(code, variables))


def _variables(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    owner = getattr(function, "__self__", None)
    if inspect.ismethod(function):
        function = function.__func__
    elif not inspect.isfunction(function):
        owner, function = function, vars(type(function)).get("__call__")
    if owner is not None and not isinstance(owner, (type, ModuleType)):
        with suppress(TypeError):
            found |= vars(owner)
    if inspect.isfunction(function):
        with suppress(ValueError):
            closure = inspect.getclosurevars(function)
            found |= {**closure.globals, **closure.nonlocals}
        defaults = inspect.signature(function).parameters.values()
        found |= {one.name: one.default for one in defaults if one.default is not one.empty}
    return found


def _members(collection: str, values: Any) -> Iterator[ListedEntry]:
    values = list(values)
    counts = Counter(map(id, values))
    known = {id(value): (value, _kind(value)) for value in values}
    # A collection without any operator is about something else.
    if any(kind in ("operator", "packet") for _, kind in known.values()):
        for key, (value, kind) in known.items():
            if kind is not None:
                yield ListedEntry(value, kind, collection, counts[key])


def _kind(value: Any) -> EntryKind | None:
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return "operator"
    if isinstance(value, OpOverloadPacket):
        return "packet"
    return "other" if inspect.isbuiltin(value) else None


def _spelled(code: CodeType, variables: dict[str, Any]) -> list[Any]:
    """Operators that the code spells out, beginning with torch, or with one of its namespaces."""
    found: list[Any] = []
    value: Any = None
    for one in dis.get_instructions(code):
        if one.opname in _CHAIN and value is not None and isinstance(one.argval, str):
            value = _attribute(value, one.argval)
            continue
        if _kind(value) is not None:
            found.append(value)
        value = variables.get(one.argval) if one.opname in _ROOTS else None
    return [value for value in found if _kind(value) in ("operator", "packet")]


def _attribute(value: Any, name: str) -> Any:
    if not (value is torch or isinstance(value, (_Ops, _OpNamespace, OpOverloadPacket))):
        return None
    with suppress(Exception):
        return getattr(value, name)
    return None


def spelled_at(path: Path) -> dict[str, int]:
    """The lines of a file that spell operators, the first for each, by the operator's name."""
    found: dict[str, int] = {}
    try:
        tree = ast.parse(content(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {node.value for node in nodes}
    for node in nodes:
        if node not in inner:
            _, spelled, name = ast.unparse(node).rpartition("ops.")
            if spelled and name:
                found.setdefault(name, node.lineno)
    return found


class _OperatorTally(Struct):
    """As :class:`DecidedOperator`, while it is counted."""

    met: int = 0
    decided: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    kept_bytes: int = 0
    result_bytes: int = 0
    held_bytes: int = 0
    served: int = 0
    recomputed: int = 0


class PolicyTally(Struct, eq=False):
    """One policy at one checkpoint."""

    policy: EntriesOfPolicy
    annotation: RegionAnnotation | None
    operators: dict[Any, _OperatorTally] = field(default_factory=dict)
    regions: int = 0
    recomputes: int = 0
    raised: int = 0

    def of(self, operator: Any) -> _OperatorTally:
        return self.operators.setdefault(operator, _OperatorTally())

    def under(self, entry: ListedEntry) -> list[_OperatorTally]:
        """Those of the operators that an entry of the policy is for."""
        return [one for operator, one in self.operators.items() if entry.is_of(operator)]


class WatchedCall(Struct, eq=False, weakref=True):
    """One call of a checkpoint: its forward's mode, and its recompute's."""

    policy: EntriesOfPolicy
    group: PolicyTally | None = None
    again: bool = False
    decision: str | None = None
    asked: bool = False
    born: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    dropped: list[tuple[_OperatorTally, int, StorageWeakRef]] = field(default_factory=list)

    def forget(self) -> None:
        """The next operator is called."""
        self.decision = None


def decision_of(answer: Any) -> str:
    if isinstance(answer, bool):  # as torch reads it
        return "MUST_SAVE" if answer else "PREFER_RECOMPUTE"
    name = getattr(answer, "name", None)
    return name if isinstance(name, str) else type(answer).__name__


def keeps(decision: str) -> bool:
    return decision.endswith(("_SAVE", "_CPU_OFFLOAD"))


def storages_of(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors, each once; of a wrapper the tensors inside it."""
    seen: set[int] = set()
    queue = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]
    while queue:
        tensor = queue.pop()
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, _ = flatten()
            queue.extend(getattr(tensor, name) for name in names)
            continue
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def will_serve(mode: Any, func: Any, rest: Any) -> bool | None:
    """Whether a kept result is there for this call, by the storage of the mode."""
    key_of = getattr(torch_checkpoint, "_sac_storage_key", None)
    key = key_of(func, rest[0] if rest else ()) if key_of is not None else func
    entries = mode.storage.get(key)
    if entries is None:
        return None
    if isinstance(entries, dict):
        counter = getattr(mode, "func_counter", None)
        entry = entries.get(counter[key]) if counter is not None else None
        recompute = getattr(torch_checkpoint, "_RECOMPUTE", None)
        return None if entry is None else entry is not recompute
    return bool(entries)  # up to 2.12 a list of the kept results, in order


_UNSEEN = "A policy's decisions could not be seen"
_COMPILED = (
    "Part of the step is compiled: there a policy is asked when code is compiled, and not in a "
    "step."
)
_CACHING, _CACHED = "_CachingTorchDispatchMode", "_CachedTorchDispatchMode"


class DecisionWatch:
    """Watches between :meth:`begin` and :meth:`end`."""

    def __init__(self, sites: CallSites, guard: Guard, within: Callable[[], Within]) -> None:
        self._sites = sites
        self._guard = guard
        self._within = within
        self._patches = Patches()
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._clear()

    def _clear(self) -> None:
        self._on = False
        self._groups: dict[object, PolicyTally] = {}
        self._regions: weakref.WeakKeyDictionary[Any, WatchedCall] = weakref.WeakKeyDictionary()
        self._policies: dict[int, tuple[Any, EntriesOfPolicy]] = {}
        self._waiting: list[WatchedCall] = []

    def begin(self) -> None:
        caching = getattr(torch_checkpoint, _CACHING, None)
        cached = getattr(torch_checkpoint, _CACHED, None)
        if caching is None or cached is None:  # before torch 2.4
            return
        self._clear()
        self._on = True
        for kind, name, ours in (
            (caching, "__init__", self._made),
            (caching, "__torch_dispatch__", self._forward),
            (cached, "__init__", self._made_again),
            (cached, "__torch_dispatch__", self._recompute),
        ):
            self._patches.wrap(self._guard, kind, name, ours)

    def end(self) -> Policies | None:
        """The step has ended: what was decided. Nothing is left in the process.

        ``None`` where this torch has no policies, or no step was watched.
        """
        self._patches.undo()
        if not self._on:
            return None
        self._on = False
        found: list[WatchedPolicy] = []
        with self._lock, self._guard.part(_UNSEEN):
            found.extend(self._told(group) for group in self._groups.values())
        self._clear()
        return Policies(tuple(found), (_COMPILED,) if compiled_something() else ())

    def _made(self, call: Call, mode: Any, policy_fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen = policy_fn
        of_compiler = getattr(policy_fn, "__module__", None) == COMPILER_MODULE
        if self._on and policy_fn is not None and not of_compiler:
            with self._guard.part(_UNSEEN):
                region = WatchedCall(self._described(policy_fn))
                seen = self._asked(policy_fn, region)
                self._regions[mode] = region
                storage = args[0] if args else kwargs.get("storage")
                self._thread.made = (id(storage), region)
        return call(mode, seen, *args, **kwargs)

    def _made_again(self, call: Call, mode: Any, *args: Any, **kwargs: Any) -> Any:
        if self._on:
            storage = kwargs.get("storage", args[1] if len(args) > 1 else None)
            made: tuple[int, WatchedCall | None] = getattr(self._thread, "made", (0, None))
            known, region = made
            if region is not None and known == id(storage):
                self._regions[mode] = region
        return call(mode, *args, **kwargs)

    def _described(self, policy_fn: Any) -> EntriesOfPolicy:
        # The function is kept too, so that no other gets its address.
        known = self._policies.get(id(policy_fn))
        if known is None:
            known = self._policies[id(policy_fn)] = policy_fn, describe_policy(policy_fn)
        return known[1]

    def _asked(self, policy_fn: Any, region: WatchedCall) -> Callable[..., Any]:
        def asked(call: Call, *args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return call(*args, **kwargs)
            try:
                answer = call(*args, **kwargs)
            except BaseException:
                group = self._group(region)
                with self._lock:
                    group.raised += 1
                raise
            with self._guard.part(_UNSEEN):
                region.decision = decision_of(answer)
                group = self._group(region)
                if not region.again:
                    with self._lock:
                        one = group.of(args[1] if len(args) > 1 else None)
                        one.met += 1
                        one.decided[region.decision] = one.decided.get(region.decision, 0) + 1
            return answer

        return self._guard.around(policy_fn, asked, named=False)

    def _group(self, region: WatchedCall) -> PolicyTally:
        """Where its decisions go; known once the region runs."""
        if region.group is None:
            annotation, region.again = self._within()
            site = (annotation.site, annotation.mechanism) if annotation else ()
            with self._lock:
                key = (region.policy.key, site)
                group = self._groups.setdefault(key, PolicyTally(region.policy, annotation))
                group.regions += not region.again
            region.group = group
        return region.group

    def _forward(self, call: Call, mode: Any, func: Any, types: Any, *rest: Any, **kw: Any) -> Any:
        region = self._regions.get(mode) if self._on else None
        if region is None:
            return call(mode, func, types, *rest, **kw)
        region.forget()
        result = call(mode, func, types, *rest, **kw)
        if region.decision is not None and not region.again:
            with self._guard.part(_UNSEEN), torch._C.DisableTorchFunction(), self._lock:
                self._weigh(region, func, (rest, kw), result)
        return result

    def _weigh(self, region: WatchedCall, func: Any, inputs: Any, result: Any) -> None:
        if region.group is None:
            return
        one = region.group.of(func)
        given = {storage._cdata for storage in storages_of(inputs)}
        new = [storage for storage in storages_of(result) if storage._cdata not in given]
        region.born |= {storage._cdata for storage in new}
        if keeps(region.decision or ""):
            one.kept += 1
            for storage in storages_of(result):
                if storage._cdata in region.born and storage._cdata not in region.kept:
                    region.kept.add(storage._cdata)
                    one.kept_bytes += storage.nbytes()
            return
        if not region.dropped:
            self._waiting.append(region)
        for storage in new:
            one.result_bytes += storage.nbytes()
            region.dropped.append((one, storage.nbytes(), StorageWeakRef(storage)))

    def _recompute(
        self, call: Call, mode: Any, func: Any, types: Any, *rest: Any, **kw: Any
    ) -> Any:
        region = self._regions.get(mode) if self._on else None
        if region is None or region.group is None:
            return call(mode, func, types, *rest, **kw)
        entry = self._begun(region, mode, func, rest)
        result = call(mode, func, types, *rest, **kw)
        if entry is not None:
            with self._lock:
                one = region.group.of(func)
                one.served += entry
                one.recomputed += not entry
        return result

    def _begun(self, region: WatchedCall, mode: Any, func: Any, rest: Any) -> bool | None:
        """A recompute asks for an operator: is it served from what was kept? ``None``: ignored."""
        group = region.group
        if group is None or func in torch_checkpoint.SAC_IGNORED_OPS:
            return None
        with self._lock:
            if not region.asked:
                region.asked = True
                group.recomputes += 1
                self._see_what_is_held()
        found: list[bool | None] = [None]
        with self._guard.part(_UNSEEN):
            found.append(will_serve(mode, func, rest))
        return found[-1]

    def _see_what_is_held(self) -> None:
        """The backward pass has begun: what of the results that were not kept is there still?"""
        waiting, self._waiting = self._waiting, []
        for region in waiting:
            for one, size, reference in region.dropped:
                if not reference.expired():
                    one.held_bytes += size
            region.dropped.clear()

    def _told(self, group: PolicyTally) -> WatchedPolicy:
        policy, annotation = group.policy, group.annotation
        file = defined = ""
        if policy.code is not None:
            file = policy.code.co_filename
            defined = self._sites.line_of(file, policy.code.co_firstlineno)
        if not file and annotation is not None:
            file = self._sites.file_of(annotation.site)
        spelled = spelled_at(Path(file)) if file else {}
        return WatchedPolicy(
            name=policy.name,
            defined=defined,
            own=bool(file) and site_folder(file) is None,
            site=annotation.site if annotation else "",
            mechanism=annotation.mechanism if annotation else "",
            regions=group.regions,
            recomputes=group.recomputes,
            raised=group.raised,
            operators=tuple(
                DecidedOperator(
                    name=named(func),
                    **{**asdict(one), "decided": dict(sorted(one.decided.items()))},
                )
                for func, one in group.operators.items()
                if one.met
            ),
            entries=tuple(
                PolicyEntry(
                    name=entry.name,
                    kind=entry.kind,
                    collection=entry.collection,
                    met=sum(one.met for one in group.under(entry)),
                    kept=sum(one.kept for one in group.under(entry)),
                    times=entry.times,
                    site=self._sites.line_of(file, line)
                    if (line := spelled.get(entry.name))
                    else "",
                )
                for entry in policy.entries
            ),
        )
