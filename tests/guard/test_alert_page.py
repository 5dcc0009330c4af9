"""The page beside an alert: every change, the latest first, and names that do nothing."""

from html.parser import HTMLParser

from recompute_scan.guarding.alerts import alert_page
from recompute_scan.guarding.judge import Change


class Seen(HTMLParser):
    """The elements of a page, and its words."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.add(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def change(step: int, module: str, slower: float | None = None) -> Change:
    return Change(
        kind="doubled",
        step=step,
        alert_step=step + 2,
        modules=(module,),
        sites=(f"{module}.py:3",),
        before=1,
        after=2,
        text=f"From step {step} on, {module} is recomputed 2 times per forward.",
        slower=slower,
    )


def test_every_change_is_told_the_latest_first() -> None:
    seen = Seen()
    seen.feed(alert_page([change(20, "net.a"), change(70, "net.b", 1.25)]).decode())
    words = seen.words
    assert words.index("70") < words.index("20")
    assert {"net.a", "net.b", "net.b.py:3", "1.25 times", "not known"} <= set(words)


def test_names_are_words_only() -> None:
    seen = Seen()
    seen.feed(alert_page([change(1, "<script>alert(1)</script>\x1b[31m")]).decode())
    assert "script" not in seen.elements
    assert not any("\x1b" in one for one in seen.words)
    assert any("<script>" in one for one in seen.words)
