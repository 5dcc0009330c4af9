"""The values of names while a script is walked: classes, objects, functions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

from msgspec import Struct, field

# Conditions as written that are all true, or (False) not all true.
Condition: TypeAlias = tuple[frozenset[str], bool]
Conditions: TypeAlias = frozenset[Condition]
# The values that a name may have, each with its conditions; empty where nothing is known.
Held: TypeAlias = "tuple[tuple[Value, Conditions], ...]"
NONE: Conditions = frozenset()


class Constant(Struct, eq=False):
    """A number, a text, a truth value or ``None``."""

    value: object


class External(Struct, eq=False):
    """A name that no file that is read defines, by its dotted name."""

    name: str

    @property
    def last(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]


class Module(Struct, eq=False):
    """A file that is read, by its path, or a name in it, looked up when needed."""

    base: str
    name: str = ""


class Frame(Struct, eq=False):
    """The names of a module, or of one call of a function.

    Attributes:
        outer: Where other names are looked up.
        given: The argument for each parameter, as written.
        caller: The calling frame, and the line there.
        returned: The values of its ``return`` statements.
    """

    file: str
    names: dict[str, Held]
    outer: Frame | None = None
    function: Function | None = None
    given: Mapping[str, ast.expr | None] = {}
    caller: tuple[Frame, int] | None = None
    returned: list[Held] = field(default_factory=list)

    def owner(self, name: str) -> Frame | None:
        """The frame that has the name."""
        frame: Frame | None = self
        while frame is not None and name not in frame.names:
            frame = frame.outer
        return frame


class Function(Struct, eq=False):
    """A function with the names around it; ``kind`` where a class has it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Frame
    kind: Kind | None = None
    decorators: frozenset[str] = frozenset()


class Method(Struct, eq=False):
    """A function with its object."""

    function: Function
    owner: Value


class Partial(Struct, eq=False):
    """Anything that is called, with some of its arguments, and where they are given."""

    target: Value
    arguments: tuple[Held, ...]
    keywords: dict[str, Held]
    call: ast.Call
    frame: Frame


class Kind(Struct, eq=False):
    """A class of a file that is read."""

    name: str
    names: dict[str, Held]
    bases: tuple[Value, ...]

    def order(self) -> list[Kind | External]:
        """The class and those that it inherits from, nearest first."""
        found: dict[int, Kind | External] = {}

        def add(kind: Kind) -> None:
            if id(kind) not in found and len(found) < _MOST_BASES:
                found[id(kind)] = kind
                for base in kind.bases:
                    if isinstance(base, Kind):
                        add(base)
                    elif isinstance(base, External):
                        found[id(base)] = base

        add(self)
        return list(found.values())

    def find(self, name: str, after: Kind | None = None) -> Held | None:
        """The attribute of the class, or of one behind ``after`` in its order."""
        order = [kind for kind in self.order() if isinstance(kind, Kind)]
        for kind in order[order.index(after) + 1 :] if after in order else order:
            if name in kind.names:
                return kind.names[name]
        return None


class Object(Struct, eq=False):
    """An object of a class; lists, tuples and dictionaries, too.

    Attributes:
        attributes: Its attributes; of a dictionary its entries.
        items: The items of a sequence.
        around: Checkpoints that are wrapped around it, innermost first.
        vague: Its fields may be anything.
    """

    kind: Kind | External
    attributes: dict[str, Held] = field(default_factory=dict)
    items: list[Held] = field(default_factory=list)
    around: list[tuple[CheckpointSite, Conditions]] = field(default_factory=list)
    vague: bool = False

    def parts(self) -> Iterator[Object]:
        """The objects that it holds itself."""
        for held in (*self.items, *self.attributes.values()):
            for value, _ in held:
                if isinstance(value, Object):
                    yield value

    def below(self) -> list[Object]:
        """All that it holds, at any depth."""
        found: dict[int, Object] = {}
        waiting = list(self.parts())
        while waiting and len(found) < _MOST_OBJECTS:
            each = waiting.pop()
            if id(each) not in found and each is not self:
                found[id(each)] = each
                waiting.extend(each.parts())
        return list(found.values())


class Parent(Struct, eq=False):
    """``super()`` in a method: the object, and the class that defines the method."""

    owner: Object
    kind: Kind


class Call(Struct, eq=False):
    """One call: its arguments, its keywords (``**`` where more may be given), and its place."""

    arguments: list[Held]
    keywords: dict[str, Held]
    node: ast.Call
    frame: Frame

    @property
    def first(self) -> Held:
        """The first argument."""
        return self.arguments[0] if self.arguments else ()

    def of(self, *arguments: Held) -> Call:
        """A call in the same place with these arguments."""
        return Call([*arguments], {}, self.node, self.frame)


class CheckpointSite(Struct, frozen=True, order=True):
    """The place of a checkpoint: its statement, its variant, the code in it in words.

    ``alone`` where the statement wraps one class and nothing else.
    """

    file: str
    line: int
    variant: str
    around: str
    alone: bool = False


Value: TypeAlias = (
    Constant | External | Module | Function | Method | Partial | Kind | Object | Parent
)
_MOST_BASES = 50
_MOST_OBJECTS = 2_000


def one(value: Value) -> Held:
    """A name that stands for this, whatever the conditions."""
    return ((value, NONE),)


def pooled(helds: Iterable[Held]) -> Held:
    """All values of any of these."""
    several = [held for held in helds if held]
    if len(several) < 2:
        return several[0] if several else ()
    found = {(id(value), when): (value, when) for held in several for value, when in held}
    return tuple(found.values())


def under(held: Held, conditions: Conditions) -> Held:
    """The same under further conditions."""
    return tuple((value, when | conditions) for value, when in held) if conditions else held


def contradict(conditions: Conditions) -> bool:
    """Whether they are never true together."""
    true = {text for texts, holds in conditions if holds for text in texts}
    return any(texts <= true for texts, holds in conditions if not holds)


def sequence(items: Iterable[Held]) -> Held:
    """A list of these."""
    return one(Object(External("list"), items=list(items)))


def elements(held: Held) -> Held:
    """The values that a loop over it gives."""
    return pooled(
        under(item, when)
        for value, when in held
        if isinstance(value, Object)
        for item in (value.items or value.attributes.values())
    )


def truth(held: Held, conditions: Conditions = NONE) -> bool | None:
    """Whether it is true, where that is known under these conditions."""
    found: set[bool | None] = set()
    for value, when in held:
        if isinstance(value, Constant):
            found.add(bool(value.value))
        else:
            found.add(None if isinstance(value, External | Module) else True)
        if not when <= conditions:
            found.add(None)
    return found.pop() if len(found) == 1 else None


class Enough(Exception):
    """The walk has taken all its steps."""


class Nested(Struct, eq=False):
    """A checkpoint, ``inner``, that is met inside another.

    Attributes:
        conditions: The conditions of the walk there.
        followed: Whether what runs behind the inner one, still in the outer, keeps anything for the
            backward pass; ``None`` where that is not known.
        early_stop_off: torch's early stop is off.
    """

    outer: CheckpointSite
    inner: CheckpointSite
    conditions: Conditions
    followed: bool | None = False
    early_stop_off: bool = False


class Region(Struct, eq=False):
    """A checkpoint that is being walked, and those that were met in it so far."""

    site: CheckpointSite
    loops: int
    met: list[Nested]


def all_constant(held: Held) -> bool:
    return all(isinstance(value, Constant) for value, _ in held)


def identity(value: Value) -> object:
    return repr(value.value) if isinstance(value, Constant) else value


def written(node: ast.AST) -> str:
    with suppress(RecursionError):
        return " ".join(ast.unparse(node).split())[:200]
    return "?"


def called(value: Value) -> str:
    """Its name in sentences."""
    if isinstance(value, Object):
        return value.kind.name if isinstance(value.kind, Kind) else value.kind.last
    if isinstance(value, Method):
        owner = f"{called(value.owner)}." if isinstance(value.owner, Object) else ""
        return owner + getattr(value.function.node, "name", "lambda")
    if isinstance(value, Function):
        return getattr(value.node, "name", "lambda")
    if isinstance(value, Partial):
        return called(value.target)
    return getattr(value, "name", "")


def copied(value: Object, done: dict[int, Object]) -> Object:
    if id(value) in done:
        return done[id(value)]
    made = done[id(value)] = Object(value.kind, around=list(value.around), vague=value.vague)

    def copy(held: Held) -> Held:
        return tuple(
            (copied(each, done) if isinstance(each, Object) else each, when) for each, when in held
        )

    made.attributes = {name: copy(held) for name, held in value.attributes.items()}
    made.items = [copy(held) for held in value.items]
    return made
