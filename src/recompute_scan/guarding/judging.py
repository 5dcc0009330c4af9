"""Whether a step's recomputes are what they were: plain data in, changes out.

Ratios are not compared, because a healthy training varies them: evaluation enters regions that no
backward pass comes to, micro-batches vary, optimizers skip steps. What is compared is which
checkpoints of a module were recomputed at all, and that is a change once several steps in a row
show what no step has shown before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct, field

from recompute_scan.guarding.changes import Change, Kind, Parts, count, kind_of, sentence

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


class _Told(Struct):
    modules: list[str] = field(default_factory=list)
    sites: dict[str, None] = field(default_factory=dict)


class Judge:
    """Knows what is usual, and tells what is not.

    Args:
        learning: Steps whose recomputes are what is usual; none where a stored baseline is given.
        usual: Checkpoints of each module in a stored baseline.
        training: Tells of a module by name whether it is trained now.
        trained_then: Tells whether it was, when the first steps were over.

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
    ) -> None:
        self._learning = learning
        self._training = training
        self._trained_then = trained_then
        self._known = {name: _Known({parts}, (), parts) for name, parts in usual.items()}
        self.step = 0
        self.settled = False
        self._began = 0

    def usual(self) -> dict[str, Parts]:
        """What each module's checkpoints are now, for a stored baseline."""
        return {name: known.last for name, known in self._known.items() if known.last}

    def begin_at(self, step: int) -> None:
        """The steps before this one are of an earlier run."""
        self.step = self._began = step

    def recount(self, steps: int) -> None:
        """So many steps of this run have ended, and not as many as were seen until now."""
        self.step = self._began + steps

    def see(self, seen: Mapping[str, SeenStep]) -> list[Change]:
        """A step has ended: what has changed, if anything."""
        self.step += 1
        learning = self.step - self._began < self._learning
        found: dict[tuple[Kind, int, Parts, Parts], _Told] = {}
        for name, one in seen.items():
            known = self._known.get(name)
            if known is None:
                if not one.parts:
                    continue
                known = self._known[name] = _Known(
                    {one.parts} if learning else {()}, (), one.parts if learning else ()
                )
                known.first = self.step
            if one.sites and not known.sites:
                known.sites = one.sites
            self._compare(name, known, one, found, learning=learning)
        for name, known in self._known.items():
            if name not in seen:
                nothing = SeenStep((), (), entered=False)
                self._compare(name, known, nothing, found, learning=learning)
        self.settled = all(known.unlike is None for known in self._known.values())
        return [
            Change(
                kind=kind,
                step=step,
                told=self.step,
                modules=tuple(told.modules),
                sites=tuple(told.sites),
                before=count(before),
                after=count(after),
                text=sentence(kind, step, tuple(told.modules), tuple(told.sites), before, after),
            )
            for (kind, step, before, after), told in found.items()
        ]

    def _compare(
        self,
        name: str,
        known: _Known,
        one: SeenStep,
        found: dict[tuple[Kind, int, Parts, Parts], _Told],
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
        before = known.last
        if kind == "adopt":
            known.usual, known.last, known.unlike = {one.parts}, one.parts, None
            return
        known.changed = True
        told = found.setdefault((kind, known.since, before, one.parts), _Told())
        told.modules.append(name)
        told.sites.update(dict.fromkeys(one.sites or known.sites))
        known.usual, known.last, known.unlike = {one.parts}, one.parts, None

    def _kind(self, name: str, known: _Known, one: SeenStep) -> Kind | Literal["adopt"] | None:
        """What has changed; ``None`` where there may be a good reason, to be asked again later."""
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
        if training == "idle" and known.entered and _reentrant(known.last) and self._others(name):
            return "lost"
        if training == "unknown" and not any(
            other.unlike is None and other.last for other in self._known.values()
        ):
            return "off"
        return None

    def _twin(self, name: str, *, gone: bool) -> _Known | None:
        """The same module of another model of its kind: that one's names may have the model's own
        before them. One that is ``gone`` now, or one that came when this one went.
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


def _reentrant(parts: Parts) -> bool:
    return any(one.variant == "reentrant" for one in parts)
