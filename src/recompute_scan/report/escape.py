"""Names out of a trace, made harmless: for a page, a terminal, Markdown and a script block.

A trace is written by somebody else's program, so every name in it may hold markup, terminal
codes, or characters that reverse the reading direction (the "Trojan Source" trick,
https://trojansource.codes). Here they become visible text. HTML quoting itself is the
template engine's work (autoescaping); these functions do what quoting cannot.
"""

from __future__ import annotations

import re
import unicodedata

from recompute_scan.terminal import UNSEEN, inert, printable

LONGEST_NAME = 120

# A word joiner after these keeps a tracker from seeing a mention, a reference or a link.
_TRACKER = re.compile(r"(@|#(?=\d)|GH(?=-\d)|:(?=//)|\bwww(?=\.))", re.IGNORECASE)
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_MARKDOWN_START = re.compile(r"^(\d*)([-+#>=.)])")
_JOINER = "\N{WORD JOINER}"


def visible(text: str, limit: int = LONGEST_NAME) -> str:
    """A name fit to show: one line, nothing unseen, at most ``limit`` characters.

    A longer name loses its middle, since both ends of a module path or a file name say more.
    """
    # an escape is at most ten characters, so no more than this can matter at either end
    if len(text) > 2 * limit:
        text = text[:limit] + "…" + text[-limit:]
    return shorten(inert(text), limit)


def sentence(text: str, limit: int) -> str:
    """Prose fit to show: nothing unseen, and where it is longer than ``limit``, cut at the end of
    its last whole word. A word that is too long alone loses its middle, as a name does.
    """
    shown = inert(text[: 2 * limit])
    if len(shown) <= limit:
        return shown
    kept, space, _ = shown[: limit - 1].rpartition(" ")
    return f"{kept.rstrip(' ,;:(')} …" if space and kept.strip() else shorten(shown, limit)


def shorten(text: str, limit: int) -> str:
    """The text with its middle replaced by one ``…`` where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head - 1
    return text[:head] + "…" + (text[-tail:] if tail > 0 else "")


def lines(text: str) -> list[str]:
    """A block of text (a diff, a source line) as lines; only tabs and line ends stay unseen."""
    return inert(text.replace("\r\n", "\n"), keep="\n\t").split("\n")


def script_json(text: str) -> str:
    r"""JSON text that means the same and can stand anywhere in a page.

    ``<``, ``>`` and ``&`` become ``\u`` escapes, so that no ``</script>`` or ``<!--`` remains,
    and so do unseen characters, which JSON strings hold but no JSON syntax does.
    """
    quoted = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    if quoted.isascii() and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", quoted):
        return quoted
    return "".join(_json_spell(char) for char in quoted)


def json_text(text: str) -> str:
    """JSON text that means the same, with every unseen character of its strings as an escape.

    A command of a CI service (``##[error]``, ``##vso[…]``) is one wherever it is in a line.
    """
    text = text.replace("##", "#\\u0023")
    if text.isascii() and "\x7f" not in text:  # the encoder has spelled out what is below a blank
        return text
    return "".join(_json_spell(char) for char in text)


def markdown_text(text: str) -> str:
    """Markdown as it may be printed; what keeps a tracker from seeing mentions stays."""
    return printable(text, keep=f"\n\t{_JOINER}")


def _json_spell(char: str) -> str:
    if char in "\n\t" or unicodedata.category(char) not in UNSEEN:
        return char
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


def markdown_prose(text: str) -> str:
    """Text that Markdown shows as it stands: no markup, no HTML, no mention, no reference."""
    quoted = inert(text.strip()).replace("&", "&amp;").replace("<", "&lt;")
    # joiners go in before the backslashes, which would otherwise hide what they look for
    quoted = _MARKDOWN.sub(r"\\\1", _TRACKER.sub(r"\1" + _JOINER, quoted))
    return _MARKDOWN_START.sub(r"\1\\\2", quoted)


def markdown_code(text: str, limit: int = LONGEST_NAME) -> str:
    """A name as inline code whose quotes are longer than any run of backticks inside."""
    shown = visible(text, limit).replace("|", "¦") or " "
    ticks = "`" * (_longest_run(shown, "`") + 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def markdown_fence(text: str, language: str = "") -> str:
    """A fenced block that nothing inside can close: its fence is longer than any run inside."""
    body = "\n".join(lines(text.rstrip("\n")))
    ticks = "`" * max(3, _longest_run(body, "`") + 1)
    return f"{ticks}{language}\n{body}\n{ticks}"


def _longest_run(text: str, char: str) -> int:
    return max((len(run) for run in re.findall(f"{re.escape(char)}+", text)), default=0)
