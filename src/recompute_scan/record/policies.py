"""Sees the policies of selective checkpoints decide, in the one step that has Python stacks.

torch asks a policy from inside a dispatch mode that it makes for each call of the checkpoint, and
recomputes through a second one. For that step the two modes' classes carry wrappers; whoever made
the modes, and whatever the policy is, they pass there. The step's times are never used, so that
looking costs no figure anything. A policy gets the arguments that torch gives it, once, and what
it returns or raises goes on unchanged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from recompute_scan.deciding import (
    DecidedOperator,
    Policies,
    PolicyEntry,
    WatchedPolicy,
)
from recompute_scan.record.call_sites import CallSites
from recompute_scan.record.compat import compiled_something
from recompute_scan.record.guard import Call, Guard
from recompute_scan.record.ownership import site_folder
from recompute_scan.record.patches import Patches
from recompute_scan.record.region_ranges import Within
from recompute_scan.record.watched_policies import (
    EntriesOfPolicy,
    PolicyTally,
    WatchedCall,
    decision_of,
    describe_policy,
    keeps,
    named,
    spelled_at,
    storages_of,
    will_serve,
)

_UNSEEN = "A policy's decisions could not be seen"
COMPILED = (
    "Part of the step is compiled: there a policy is asked when code is compiled, and not in a "
    "step."
)
_CACHING, _CACHED = "_CachingTorchDispatchMode", "_CachedTorchDispatchMode"


class DecisionWatch:
    """Watches between :meth:`begin` and :meth:`end`."""

    def __init__(self, sites: CallSites, guard: Guard, within: Callable[[], Within | None]) -> None:
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
        """The step begins."""
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
            original = getattr(kind, name)
            self._patches.replace(kind, name, self._guard.around(original, ours))

    def end(self) -> Policies | None:
        """The step has ended: what was decided. Nothing is left in the process.

        ``None`` where this torch has no policies, or nobody looked.
        """
        self._patches.undo()
        if not self._on:
            return None
        self._on = False
        found: list[WatchedPolicy] = []
        with self._lock, self._guard.part(_UNSEEN):
            found.extend(self._told(group) for group in self._groups.values())
        self._clear()
        return Policies(tuple(found), (COMPILED,) if compiled_something() else ())

    def _made(self, call: Call, mode: Any, policy_fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen = policy_fn
        if self._on and policy_fn is not None:
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
        # The function is kept beside, so that its number means no other.
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
                if (group := self._group(region)) is not None:
                    with self._lock:
                        group.raised += 1
                raise
            with self._guard.part(_UNSEEN):
                region.decision = decision_of(answer)
                operator = args[1] if len(args) > 1 else None
                if (group := self._group(region)) is not None and not region.again:
                    with self._lock:
                        one = group.of(operator)
                        one.met += 1
                        one.decided[region.decision] = one.decided.get(region.decision, 0) + 1
            return answer

        return self._guard.around(policy_fn, asked, named=False)

    def _group(self, region: WatchedCall) -> PolicyTally | None:
        """Where its decisions go; known once the region runs."""
        if region.group is None:
            within = self._within()
            annotation = within.annotation if within is not None else None
            region.again = within is not None and within.again
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
                if entry:
                    one.served += 1
                else:
                    one.recomputed += 1
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
        file = policy.code.co_filename if policy.code is not None else ""
        defined = ""
        if policy.code is not None:
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
                    met=one.met,
                    decided=dict(sorted(one.decided.items())),
                    kept=one.kept,
                    kept_bytes=one.kept_bytes,
                    result_bytes=one.result_bytes,
                    held_bytes=one.held_bytes,
                    served=one.served,
                    recomputed=one.recomputed,
                )
                for func, one in group.operators.items()
                if one.met
            ),
            entries=tuple(
                PolicyEntry(
                    name=entry.name,
                    kind=entry.kind,
                    collection=entry.collection,
                    met=sum(one.met for func, one in group.operators.items() if entry.is_of(func)),
                    kept=sum(
                        one.kept for func, one in group.operators.items() if entry.is_of(func)
                    ),
                    times=entry.times,
                    site=self._sites.line_of(file, spelled[entry.name])
                    if entry.name in spelled
                    else "",
                )
                for entry in policy.entries
            ),
        )
