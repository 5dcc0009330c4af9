"""A section of the report, the page of a terminal that it writes on, and blocks in groups."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click
from msgspec import Struct, field

from recompute_scan.report.templating import markdown_list, markdown_prose, sentence, visible
from recompute_scan.result import Checkpoint, Region, Result
from recompute_scan.units import UNITS, runs_of

_T = TypeVar("_T")
WIDTH = 80
_COLUMN = 22


class Page(Struct):
    """The lines written so far."""

    color: bool
    width: int = WIDTH
    written: list[str] = field(default_factory=list)

    def style(self, text: str, **how: object) -> str:
        return click.style(text, **how) if self.color and how else text  # type: ignore[arg-type]

    def title(self, text: str) -> None:
        self.written += ["", self.style(text, bold=True)]

    def prose(
        self,
        text: str,
        indent: str = "  ",
        first: str | None = None,
        most: int | None = None,
        **how: Any,
    ) -> None:
        """Words wrapped to the width; colour goes on whole lines, so that widths stay true.

        What would take more than ``most`` lines is cut at the end of a word.
        """
        start, limit = indent if first is None else first, 2000
        found = wrap(sentence(text, limit), indent, start, self.width) if text else []
        while most is not None and len(found) > most:
            limit = min(limit, most * self.width + 8) - 8
            found = wrap(sentence(text, limit), indent, start, self.width)
        self.written += [self.style(line, **how) for line in found]

    def cut(self, text: str, indent: str, **how: object) -> None:
        """One line, cut at the width."""
        self.verbatim(fitted(text.expandtabs(4), self.width - len(indent)), indent, **how)

    def taken(self) -> list[str]:
        """The lines written so far, which are no longer on the page."""
        found, self.written = self.written, []
        return found

    def row(self, label: str, value: str, note: str = "", **how: object) -> None:
        head = f"  {label:<{_COLUMN}}"
        plain = f"{head}{value}"
        # the first line is measured without codes, then given them
        rest = wrap(note, " " * (len(head) + 11), f"{plain:<{len(head) + 9}}  ", self.width)
        self.written.append(head + self.style(value, **how) + rest[0][len(plain) :].rstrip())
        self.written += rest[1:]

    def verbatim(self, text: str, indent: str, **how: object) -> None:
        """A line to copy: never wrapped, tabs spelled as spaces."""
        self.written.append(self.style(indent + text.expandtabs(4), **how))


def wrap(text: str, indent: str, first: str, width: int = WIDTH) -> list[str]:
    """Lines of at most so many columns; a word longer than a line is cut.

    A number and its unit stay together.
    ``first`` starts the first line, ``indent`` all others; both are narrower than a line.
    """
    found, line, empty = [], first, True
    for word in _words(text):
        if not empty and columns(line) + 1 + columns(word) > width:
            found.append(line)
            line, empty = indent, True
        line += word if empty else f" {word}"
        empty = False
        while columns(line) > width:
            cut = _fitting(line, width)
            found.append(line[:cut])
            line = indent + line[cut:]
    return [*found, line]


def _words(text: str) -> list[str]:
    found: list[str] = []
    for word in text.split():
        if found and word.rstrip(".,;:)") in UNITS and found[-1][-1].isdigit():
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _fitting(line: str, width: int) -> int:
    """How many characters of a line fit into the width, at least one of them."""
    used = 0
    for place, char in enumerate(line):
        used += columns(char)
        if used > width:
            return max(place, 1)
    return len(line)


def fitted(text: str, width: int) -> str:
    """As much of a text as fits into the width, harmless, and a ``…`` where that is not all."""
    shown = visible(text, 2 * width)
    return shown if columns(shown) <= width else shown[: _fitting(shown, width - 1)] + "…"


def columns(text: str) -> int:
    """How many terminal columns a text takes; wide (East Asian) characters take two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


_LAST_NUMBER = re.compile(r"^(.*?)(\d{1,9})(\D*)$", re.DOTALL)
_MOST_RANGES = 6


class BlockGroup(Struct, frozen=True):
    """Blocks that are the same but for their number. ``label`` is not escaped yet."""

    label: str
    regions: tuple[Region, ...]

    @property
    def first(self) -> Region:
        """The earliest of them in forward order."""
        return self.regions[0]

    @property
    def recompute_ms(self) -> float:
        """All their recomputes in one step, in ms."""
        return sum(region.recompute_ms_per_step for region in self.regions)

    @property
    def redundant_ms(self) -> float:
        """Their redundant recomputes in one step, in ms."""
        return sum(region.redundant_ms_per_step for region in self.regions)


class Stack(Struct, frozen=True):
    """One arrangement of checkpoints, outermost first, and the blocks it is around."""

    label: str
    blocks: int
    recomputes: float
    checkpoints: tuple[Checkpoint, ...]


def block_label(region: Region) -> str:
    """The block's module, or its number and signature where no module is known."""
    return region.module or f"block {region.ordinal} ({region.signature})"


def block_groups(regions: Iterable[Region]) -> list[BlockGroup]:
    """Blocks gathered by name pattern, class, recomputes and checkpoints, in forward order."""
    groups: dict[object, list[Region]] = {}
    for region in regions:
        key = (
            *_pattern(region)[:2],
            region.module_class,
            round(region.recompute_runs_per_backward, 2),
            region.checkpoints,
        )
        groups.setdefault(key, []).append(region)
    return [BlockGroup(_group_label(members), tuple(members)) for members in groups.values()]


def _pattern(region: Region) -> tuple[str, str, int]:
    """The text before and after the block's number, and the number."""
    if region.module is None:
        return ("block ", "", region.ordinal)
    match = _LAST_NUMBER.match(region.module)
    if match is None:
        return (region.module, "", -1)
    return (match[1], match[3], int(match[2]))


def _group_label(members: Sequence[Region]) -> str:
    before, after, first = _pattern(members[0])
    if len(members) == 1:
        return block_label(members[0])
    if first < 0:
        return before
    if members[0].module is None:
        before = "blocks "
    numbers = ranges(sorted({_pattern(region)[2] for region in members}))
    return f"{before}[{numbers}]{after}" if "," in numbers else f"{before}{numbers}{after}"


def ranges(numbers: Sequence[int], most: int = _MOST_RANGES) -> str:
    """``0-3, 7``; of more than ``most`` parts the middle is left out: ``0, 2, 4, …, 30``."""
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs_of(numbers)]
    if len(parts) > most:
        parts = [*parts[:3], "…", parts[-1]]
    return ", ".join(parts)


def names_of(regions: Iterable[Region]) -> str:
    """The blocks by name, of at most three groups, and how many others there are."""
    groups = block_groups(regions)
    more = f" and {sum(len(one.regions) for one in groups[3:])} more" if len(groups) > 3 else ""
    return ", ".join(group.label for group in groups[:3]) + more


def checkpoint_stacks(regions: Iterable[Region]) -> list[Stack]:
    """Checkpoint call sites: each arrangement of checkpoints once, most recomputes first."""
    stacks: dict[tuple[Checkpoint, ...], list[Region]] = {}
    for region in regions:
        if region.checkpoints:
            stacks.setdefault(region.checkpoints, []).append(region)
    found = [
        Stack(
            label=names_of(members),
            blocks=len(members),
            recomputes=max(region.recompute_runs_per_backward for region in members),
            checkpoints=checkpoints,
        )
        for checkpoints, members in stacks.items()
    ]
    return sorted(found, key=lambda stack: -stack.recomputes)


def analysed(result: Result) -> bool:
    """Whether steps were recorded: a run may fail before its first one, or only compare one."""
    if of_memory_alone(result):
        return False
    return bool(result.steps) or (result.crash is None and result.fidelity is None)


def of_memory_alone(result: Result) -> bool:
    """Whether there is nothing but memory snapshots, which hold no operators."""
    return bool(result.snapshots) and not result.steps and not result.ranks and not result.crash


def always(_result: Result) -> bool:
    """Whatever the result: such a section says itself what is not known."""
    return True


def known(part: _T | None) -> _T:
    """The part of a result that a section is there for: ``present`` has seen it."""
    assert part is not None
    return part


class Section(Struct, frozen=True):
    """One section; the page, the terminal and Markdown each ask it for their part.

    Attributes:
        anchor: Its ``id`` on the page. Links to it are passed on, so that it never changes.
        title: Its heading on the page, or what gives it for a result.
        template: The file in its folder that shows it on the page.
        present: Whether a result has this section; asked for every rendering.
        html: What the template shows. Every section's template also has ``result``, ``heading``,
            ``attachments``, ``words`` and ``units``.
        lead: The answer in a few sentences, which the template shows too; of several paragraphs,
            Markdown makes a list.
        text: Writes its lines for a terminal; the lead under the title unless given.
        markdown: Its part of the Markdown; the lead under the title unless given.
        link: What the page's navigation calls it; without one it is not listed there.
        help: The line about it under "How to read this page": its name there, and the text.
    """

    anchor: str
    title: str | Callable[[Result], str]
    template: str
    present: Callable[[Result], bool] = analysed
    html: Callable[[Result], Mapping[str, Any]] = lambda _: {}
    lead: Callable[[Result], str | list[str]] | None = None
    text: Callable[[Page, Result], None] | None = None
    markdown: Callable[[Result], str] | None = None
    link: str | None = None
    help: tuple[str, str] | None = None

    def heading(self, result: Result) -> str:
        """The title for this result."""
        return self.title if isinstance(self.title, str) else self.title(result)

    def write(self, page: Page, result: Result) -> None:
        """Write its lines for a terminal."""
        if self.text is not None:
            self.text(page, result)
        elif self.lead is not None:
            page.title(self.heading(result))
            said = self.lead(result)
            for each in [said] if isinstance(said, str) else said:
                page.prose(each)

    def as_markdown(self, result: Result) -> str:
        """Its part of the Markdown; empty for nothing."""
        if self.markdown is not None:
            return self.markdown(result)
        if self.lead is None:
            return ""
        said = self.lead(result)
        shown = markdown_prose(said) if isinstance(said, str) else markdown_list(said)
        return f"#### {self.heading(result)}\n\n{shown}"
