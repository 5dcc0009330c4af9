"""A page taken apart with the standard library's parser, for tests to ask questions of."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr", "source"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    # Left out of the representation, which pytest shows of a failure and which would never end.
    above: tuple[Element, ...] = field(repr=False)
    pieces: list[str] = field(default_factory=list, repr=False)
    children: list[Element] = field(default_factory=list, repr=False)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()


class Page(HTMLParser):
    """``elements`` in document order; text belongs to an element and to all above it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.unclosed: list[Element] = []
        self.stray: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), tuple(self.unclosed))
        assert len(attrs) == len(element.attributes), f"an attribute twice on <{tag}>"
        if self.unclosed:
            self.unclosed[-1].children.append(element)
        self.elements.append(element)
        if tag not in VOID:
            self.unclosed.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.unclosed.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.unclosed and self.unclosed[-1].tag == tag:
            self.unclosed.pop()
        else:
            self.stray.append(tag)

    def handle_data(self, data: str) -> None:
        for element in self.unclosed:
            element.pieces.append(data)

    def all(self, tag: str) -> list[Element]:
        return [element for element in self.elements if element.tag == tag]

    def one(self, name: str) -> Element:
        (found,) = [item for item in self.elements if item.attributes.get("id") == name]
        return found
