"""The usual recomputes of a training, and changes from them.

A region is a module, or a function, with a variant, whichever line calls it. While the script
computes, its calls are only counted; names are looked up between steps.

Ratios are not compared, because a healthy training varies them: evaluation enters regions that no
backward pass comes to, micro-batches vary, optimizers skip steps. Compared are the checkpoints of a
module that were recomputed at all: several steps in a row that show a new set are a change.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal

import msgspec
from msgspec import Struct
from torch import nn

from recompute_scan.errors import InputError
from recompute_scan.files import content, decoded, write_whole
from recompute_scan.record.attribution import CallSites
from recompute_scan.record.modules import covered_modules, unwrapped
from recompute_scan.record.origins import Variant
from recompute_scan.units import plural


class TalliedRegion(Struct, eq=False):
    """The counters of one region. Those of a step are set to 0 when it has ended.

    Attributes:
        covered: The module that it covers, while that lives; ``None`` where there is none.
        held: What was called, while it lives; ``None`` where it is kept.
        code: What is kept, so that nothing else has its address.
        entered: Calls.
        nested: Of these, those that ran during a recompute of another region.
        recomputed: Runs behind the first one of a call.
        again: Of these, behind the second one.
        handed_on: How often a run behind the first met another checkpoint of the same module.
            That one counts all its runs, and where it keeps its inputs itself, there are none.
        keeps_random: Whether recomputes draw the forward's random numbers, as the last call has it.
        bits: What the last step did, as one number.
        sampling: What the next call is compared by, if anything.
    """

    variant: Variant
    covered: weakref.ref[nn.Module] | None
    function: str
    site: str
    name: str | None = None
    held: weakref.ref[Any] | None = None
    code: object = None
    entered: int = 0
    nested: int = 0
    recomputed: int = 0
    again: int = 0
    handed_on: int = 0
    keeps_random: bool = True
    bits: int = 0
    sampling: Any = None

    @property
    def module(self) -> nn.Module | None:
        """The covered object, while it lives."""
        return None if self.covered is None else self.covered()

    @property
    def runs_again(self) -> bool:
        """Whether its own recomputes ran the module, and not another checkpoint of it."""
        return self.recomputed > self.handed_on

    def covers(self, other: TalliedRegion) -> bool:
        """Whether both are checkpoints of the same module."""
        return self.covered is not None and self.module is other.module

    @property
    def gone(self) -> bool:
        """Whether it had a module, or another object that was called, which is no more."""
        return any(known is not None and known() is None for known in (self.covered, self.held))


class Tallies:
    """All regions of a process, found by what is called.

    A checkpointed module is known by its address, until it is no more. Functions are made anew for
    each call, as a rule, and are known by their code and the module that they run.
    """

    def __init__(self, sites: CallSites) -> None:
        self._sites = sites
        self._known: dict[Variant, dict[Any, TalliedRegion]] = {}
        # By address, since a code's hash is slow; so the code is kept.
        self._cells: dict[int, tuple[int, CodeType]] = {}
        self.regions: list[TalliedRegion] = []

    def of(self, variant: Variant) -> Mapping[int, TalliedRegion]:
        """Regions of modules that are called themselves, by their addresses."""
        return self._known.setdefault(variant, {})

    def found(
        self, variant: Variant, args: tuple[Any, ...], at: int
    ) -> tuple[int, TalliedRegion | None]:
        """The region of a call, and where among the arguments its function is.

        Args:
            variant: Which kind of checkpoint it is.
            args: Positional arguments of torch's function.
            at: Where the function is as a rule.
        """
        if not (len(args) > at and callable(args[at])):
            at = next((n for n, one in enumerate(args[:4]) if callable(one)), -1)
            if at < 0:
                return at, None
        function = args[at]
        if type(function) is functools.partial:
            function = function.func
        kind = type(function)
        held: Any = function
        key: Any = None
        if kind is MethodType:
            held = function.__self__
        elif kind is FunctionType:
            held = self._module_of(function, args[at + 1 :])
            key = id(held), id(function.__code__)
        elif not isinstance(function, nn.Module):  # an object, made for the call perhaps
            parts = getattr(function, "__dict__", {}).values()
            held = next((one for one in parts if isinstance(one, nn.Module)), kind)
            key = id(held), id(kind)
        regions = self._known.setdefault(variant, {})
        region = regions.get(key or id(held))
        if region is None:
            region = self._new(regions, key or id(held), variant, held, function)
        return at, region

    def _module_of(self, function: FunctionType, args: tuple[Any, ...]) -> object:
        """The module that a function runs, else its code."""
        code = function.__code__
        cell = self._cells.get(id(code))
        if cell is not None and function.__closure__ is not None:
            with suppress(ValueError):  # emptied meanwhile
                held = function.__closure__[cell[0]].cell_contents
                if isinstance(held, nn.Module):
                    return held
        # Since 2.14, torch has the function's arguments in a tuple.
        spread = [x for one in args for x in (one if isinstance(one, tuple) else (one,))]
        covered = covered_modules(function, spread)
        if not covered:
            return code
        for number, closed in enumerate(function.__closure__ or ()):
            with suppress(ValueError):  # not filled in yet
                held = closed.cell_contents
                if isinstance(held, nn.Module) and unwrapped(held) is covered[0]:
                    self._cells[id(code)] = number, code
                    return held
        return covered[0]

    def _new(
        self,
        regions: dict[Any, TalliedRegion],
        key: object,
        variant: Variant,
        held: object,
        function: Any,
    ) -> TalliedRegion:
        module = unwrapped(held) if isinstance(held, nn.Module) else None
        named = ""
        if module is None:
            code = held if isinstance(held, CodeType) else None
            kind = held if isinstance(held, type) else type(held)
            named = code.co_name if code is not None else kind.__name__
        site = self._sites.called_at(sys._getframe(2))
        covered = None if module is None else weakref.ref(module)
        region = TalliedRegion(variant, covered, named, site)
        # Another object may get the address next. Code is kept, and objects that cannot be watched.
        region.code = getattr(function, "__code__", None)
        try:
            if not isinstance(held, CodeType):
                region.held = weakref.ref(held, lambda _: regions.pop(key, None))
        except TypeError:
            region.code = held
        regions[key] = region
        self.regions.append(region)
        return region

    def forget_gone(self) -> None:
        """Drop regions of modules that are no more: scripts make a model anew for each phase."""
        if any(region.gone for region in self.regions):
            self.regions = [region for region in self.regions if not region.gone]


_FORMAT = "recompute-scan-guard/1"
Kind = Literal["doubled", "off", "on", "variant", "random-state", "repeated", "lost", "unfaithful"]


class WatchedPart(Struct, frozen=True, order=True):
    """One checkpoint around a module, by what it costs and keeps.

    Attributes:
        variant: ``reentrant`` or ``non-reentrant``.
        keeps_random: Whether recomputes draw the forward's random numbers.
        nested: Whether another checkpoint around it runs it too, in its recompute.
        repeated: Whether one forward was recomputed several times.
    """

    variant: str
    keeps_random: bool = True
    nested: bool = False
    repeated: bool = False


# All checkpoints of one module that were recomputed in a step, sorted.
Parts = tuple[WatchedPart, ...]


class Change(Struct, frozen=True):
    """One thing that is not what it was.

    Attributes:
        kind: What has changed. ``doubled``: recomputed more often; ``off``: no longer, though
            trained; ``on``: recomputed, and was trained without; ``variant``: by the other variant;
            ``random-state``: random numbers are no longer, or again, restored; ``repeated``: one
            forward is recomputed several times; ``lost``: no longer, and its weights get no
            gradient; ``unfaithful``: a recompute computes something other than its forward.
        step: The first step that shows it, from 1.
        alert_step: The step after which the alert is sent.
        modules: Qualified names of the regions, or names of functions.
        sites: ``file:line`` that calls each, where known.
        before: Recomputes per forward before.
        after: Recomputes per forward now.
        text: All of it in a sentence or two.
        slower: Median step time since, over that before; ``None`` where unknown.
        memory: Memory in use now, over that before; ``None`` where unknown.
    """

    kind: Kind
    step: int
    alert_step: int
    modules: tuple[str, ...]
    sites: tuple[str, ...]
    before: int
    after: int
    text: str
    slower: float | None = None
    memory: float | None = None


def count(parts: Parts) -> int:
    """Recomputes per forward."""
    return sum(1 + one.nested for one in parts)


def kind_of(before: Parts, after: Parts) -> Kind:
    """The kind of change between a module's checkpoints, which are not the same."""
    if not after:
        return "off"
    if not before:
        return "on"
    if count(after) != count(before):
        return "doubled" if count(after) > count(before) else "off"
    if [one.variant for one in after] != [one.variant for one in before]:
        return "variant"
    if [one.keeps_random for one in after] != [one.keeps_random for one in before]:
        return "random-state"
    same = [one.repeated for one in after] == [one.repeated for one in before]
    return "doubled" if same else "repeated"


_SAID = {
    "doubled": "recomputed {after} per forward, {before} before: another checkpoint is on",
    "off": "recomputed {after} per forward, {before} before: a checkpoint is off",
    "on": "recomputed, unlike before: a checkpoint is on",
    "variant": "checkpointed by the other variant ({variants})",
    "random-state": "{random}",
    "repeated": "{repeated}",
    "lost": "no longer recomputed, and weights inside get no gradient",
    "unfaithful": "recomputed differently from the forward: {detail}",
}


def sentence(
    kind: Kind,
    step: int,
    modules: tuple[str, ...],
    sites: tuple[str, ...],
    before: Parts,
    after: Parts,
    detail: str = "",
) -> str:
    """The sentence for a person about a change."""
    first = modules[0] or "a function"
    who = first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"
    verb = "is" if len(modules) == 1 else "are"
    said = _SAID[kind].format(
        before=count(before),
        after=plural(count(after), "time"),
        variants=", ".join(sorted({one.variant for one in after})) or "none",
        random="recomputed with the forward's random numbers restored"
        if all(one.keeps_random for one in after)
        else "recomputed without the forward's random numbers: dropout differs",
        repeated="recomputed several times for one forward: backward runs more than once"
        if any(one.repeated for one in after)
        else "again recomputed once for each forward",
        detail=detail,
    )
    where = f" ({', '.join(sites[:2])})" if any(sites) else ""
    return f"From step {step} on, {who} {verb} {said}{where}."


class Stored(Struct, frozen=True):
    """The baseline that a guard has learned.

    Attributes:
        modules: Checkpoints of each module that is recomputed, by qualified name.
        format: ``recompute-scan-guard/1``.
        torch: Version that it was learned with.
        steps: Steps that the guard has seen, over all runs.
        trained: Modules that had gradients when the first steps were over.
    """

    modules: dict[str, tuple[WatchedPart, ...]]
    format: str = _FORMAT
    torch: str = ""
    steps: int = 0
    trained: tuple[str, ...] = ()


def read_stored(path: Path) -> Stored:
    """The baseline in a file.

    Raises:
        InputError: It cannot be read, or is no such file (``E351``).
    """
    try:
        stored = decoded(content(path), Stored)
    except OSError as error:
        raise InputError("E351", f"Cannot read {path}.", why=error.strerror) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_baseline(path, str(error)) from None
    if stored.format != _FORMAT:
        raise _no_baseline(path, f"its format is {stored.format!r}, not {_FORMAT!r}")
    return stored


def _no_baseline(path: Path, why: str) -> InputError:
    return InputError(
        "E351",
        f"{path} is not a baseline of the guard.",
        why=why,
        hint="delete it, or name another file: the guard writes it when the training ends",
    )


def write_stored(path: Path, stored: Stored) -> None:
    """Write it, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(stored)) + b"\n")


# Steps in a row that must agree. Fewer would take a step that is unlike the others for a change.
IN_A_ROW = 3
# Whether a module is trained now: `frozen` needs no gradient, `idle` got none in this step.
Training = Literal["trained", "idle", "frozen", "unknown", "gone"]


class SeenStep(Struct, frozen=True):
    """One module in one step.

    Attributes:
        parts: Its checkpoints that were recomputed.
        sites: Lines that call them.
        entered: Whether any was entered.
    """

    parts: Parts
    sites: tuple[str, ...] = ()
    entered: bool = True


class _Known(Struct):
    usual: set[Parts]
    sites: tuple[str, ...]
    last: Parts
    unlike: Parts | None = None
    since: int = 0
    entered: bool = False
    ask_at: int = IN_A_ROW
    changed: bool = False
    first: int = 0


# The modules with one change, each with its lines.
_Found = dict[tuple[Kind, int, Parts, Parts], dict[str, tuple[str, ...]]]


class Judge:
    """Knows the usual recomputes, and finds changes.

    Args:
        learning: Steps that the usual recomputes are learned from; 0 with a stored baseline.
        usual: Checkpoints of each module in a stored baseline.
        training: Whether a module, by name, is trained now.
        trained_then: Whether it was, when the first steps were over.
        began: Steps of earlier runs.

    Attributes:
        step: The steps that have ended. One that is like the step before is counted from outside.
        settled: Whether every module did in the last step what is usual; not before the first.
    """

    def __init__(
        self,
        learning: int,
        usual: Mapping[str, Parts],
        training: Callable[[str], Training],
        trained_then: Callable[[str], bool],
        began: int,
    ) -> None:
        self._learning = learning
        self._training = training
        self._trained_then = trained_then
        self._known = {name: _Known({parts}, (), parts) for name, parts in usual.items()}
        self.step = self._began = began
        self.settled = False

    def usual(self) -> dict[str, Parts]:
        """Each module's present checkpoints, for a stored baseline."""
        return {name: known.last for name, known in self._known.items() if known.last}

    def recount(self, steps: int) -> None:
        """So many steps of this run have ended, and not as many as were seen until now."""
        self.step = self._began + steps

    def see(self, seen: Mapping[str, SeenStep]) -> list[Change]:
        """A step has ended: what has changed, if anything."""
        self.step += 1
        learning = self.step - self._began < self._learning
        found: _Found = {}
        for name, one in seen.items():
            if name not in self._known and one.parts:
                usual = one.parts if learning else ()
                self._known[name] = _Known({usual}, (), usual, first=self.step)
            known = self._known.get(name)
            if known is not None:
                known.sites = known.sites or one.sites
                self._compare(name, known, one, found, learning=learning)
        for name, known in self._known.items():
            if name not in seen:
                nothing = SeenStep((), (), entered=False)
                self._compare(name, known, nothing, found, learning=learning)
        self.settled = all(known.unlike is None for known in self._known.values())
        changes = []
        for (kind, step, before, after), each in found.items():
            modules, sites = tuple(each), tuple(dict.fromkeys(chain.from_iterable(each.values())))
            text = sentence(kind, step, modules, sites, before, after)
            numbers = count(before), count(after)
            changes.append(Change(kind, step, self.step, modules, sites, *numbers, text))
        return changes

    def _compare(
        self,
        name: str,
        known: _Known,
        one: SeenStep,
        found: _Found,
        *,
        learning: bool,
    ) -> None:
        if learning:  # whatever comes, and comes and goes, is usual
            known.usual.add(one.parts)
        if one.parts in known.usual:
            known.last = one.parts or known.last
            known.unlike = None
            return
        if known.unlike != one.parts:
            known.unlike, known.since, known.ask_at = one.parts, self.step, IN_A_ROW
            known.entered = False
        known.entered |= one.entered
        in_a_row = self.step - known.since + 1
        if in_a_row < known.ask_at:
            return
        kind = self._kind(name, known, one)
        if kind is None:
            known.ask_at *= 2
            return
        if kind != "adopt":
            known.changed = True
            same = found.setdefault((kind, known.since, known.last, one.parts), {})
            same[name] = one.sites or known.sites
        known.usual, known.last, known.unlike = {one.parts}, one.parts, None

    def _kind(self, name: str, known: _Known, one: SeenStep) -> Kind | Literal["adopt"] | None:
        """The kind of change; ``None`` where there may be a good reason, to be asked later."""
        if one.parts and known.last:
            return kind_of(known.last, one.parts)
        if one.parts:  # new
            twin = self._twin(name, gone=True)
            if twin is not None and one.parts in twin.usual:
                return "adopt"
            if known.changed or self._trained_then(name) or self._near(name):
                return "doubled" if self._near(name) else "on"
            return "adopt"
        if self._twin(name, gone=False) is not None:
            return None
        training = self._training(name)
        if training == "trained":
            return "off"
        reentrant = any(one.variant == "reentrant" for one in known.last)
        if training == "idle" and known.entered and reentrant and self._others(name):
            return "lost"
        if training == "unknown" and not any(
            other.unlike is None and other.last for other in self._known.values()
        ):
            return "off"
        return None

    def _twin(self, name: str, *, gone: bool) -> _Known | None:
        """The same module of another model of its kind; its names may begin with that model's
        name. One that is ``gone`` now, or one that came when this one went.
        """
        mine = self._known[name]
        for other, known in self._known.items():
            if other == name or not _alike(name, other):
                continue
            if gone and known.unlike == ():
                return known
            if not gone and known.last and known.first >= mine.since:
                return known
        return None

    def _near(self, name: str) -> bool:
        """Whether a module around it, or inside it, has a checkpoint that is recomputed."""
        return any(
            known.last and other != name and _around(other, name)
            for other, known in self._known.items()
        )

    def _others(self, name: str) -> bool:
        """Whether others of the same model go on as before."""
        root = name.partition(".")[0]
        return any(
            known.last and known.unlike is None and other != name
            for other, known in self._known.items()
            if other.partition(".")[0] == root
        )


def _alike(one: str, other: str) -> bool:
    tails = {name.partition(".")[2] for name in (one, other)} - {""}
    return bool(tails & {one, other}) or (len(tails) == 1 and "." in one and "." in other)


def _around(one: str, other: str) -> bool:
    return one.startswith(f"{other}.") or other.startswith(f"{one}.")
