"""Templates of the page, names made harmless, and what a reader may take out of it.

Style and script are in the page and allowed by their hashes only; everything else is refused by the
content policy. Names out of a trace may hold markup, terminal codes, or characters that reverse the
reading direction (https://trojansource.codes): here they become visible text. HTML quoting itself
is the template engine's work (autoescaping); these functions do what quoting cannot.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from recompute_scan import units
from recompute_scan.frameworks.registry import PAGES
from recompute_scan.report import words
from recompute_scan.result import Proof, Result
from recompute_scan.terminal import UNSEEN, inert, printable

LONGEST_NAME = 120

# A word joiner after these keeps a tracker from seeing a mention, a reference or a link.
_TRACKER = re.compile(r"(@|#(?=\d)|GH(?=-\d)|:(?=//)|\bwww(?=\.))", re.IGNORECASE)
_MARKDOWN = re.compile(r"([\\`*_\[\]|~$])")
_MARKDOWN_START = re.compile(r"^(\d*)([-+#>=.)])")
_JOINER = "\N{WORD JOINER}"
_UNSEEN_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


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
    return _spelled(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def json_text(text: str) -> str:
    """JSON text that means the same, with every unseen character of its strings as an escape.

    A command of a CI service (``##[error]``, ``##vso[…]``) is one wherever it is in a line.
    """
    return _spelled(text.replace("##", "#\\u0023"))


def markdown_text(text: str) -> str:
    """Markdown as it may be printed; the joiners that hide mentions from a tracker stay."""
    return printable(text, keep=f"\n\t{_JOINER}")


def _spelled(text: str) -> str:
    """JSON text with unseen characters as escapes; most has none."""
    if text.isascii() and not _UNSEEN_ASCII.search(text):
        return text
    return "".join(
        re.sub("....", r"\\u\g<0>", char.encode("utf-16-be", "surrogatepass").hex())
        if char not in "\n\t" and unicodedata.category(char) in UNSEEN
        else char
        for char in text
    )


def markdown_prose(text: str) -> str:
    """Text that Markdown shows as it stands: no markup, no HTML, no mention, no reference."""
    quoted = inert(text.strip()).replace("&", "&amp;").replace("<", "&lt;")
    # joiners go in before the backslashes, which would otherwise hide what they look for
    quoted = _MARKDOWN.sub(r"\\\1", _TRACKER.sub(r"\1" + _JOINER, quoted))
    return _MARKDOWN_START.sub(r"\1\\\2", quoted)


def markdown_list(items: Iterable[str]) -> str:
    """A list of such texts."""
    return "\n".join(f"- {markdown_prose(item)}" for item in items)


def markdown_code(text: str, limit: int = LONGEST_NAME) -> str:
    """A name as inline code, in quotes that are longer than any run of backticks inside."""
    shown = visible(text, limit).replace("|", "¦") or " "
    ticks = _ticks(shown, 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def markdown_fence(text: str, language: str = "") -> str:
    """A fenced block that nothing inside can close: its fence is longer than any run inside."""
    body = "\n".join(lines(text.rstrip("\n")))
    ticks = _ticks(body, 3)
    return f"{ticks}{language}\n{body}\n{ticks}"


def _ticks(text: str, fewest: int) -> str:
    """More backticks than any run of them in the text has."""
    return "`" * max(fewest, max(map(len, re.findall("`+", text)), default=0) + 1)


_HERE = Path(__file__).parent
_INDENTATION = re.compile(r"^ +", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`|(?<!\S)(--[a-z][a-z-]*)(?![\w-])")


def fill(template: str, **values: Any) -> str:
    """A page of ours: the template with our style and script, and a policy that allows no other."""
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return fill_part(template, style=style, script=script, policy=policy, **values)


def fill_part(template: str, **values: Any) -> str:
    """The template with its values, escaped, and words and units; no page around it."""
    return _environment().get_template(template).render(words=words, units=units, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([_HERE / "templates", _HERE / "sections"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters.update(
        name=visible,
        said=sentence,
        prose=_prose,
        ms=units.ms,
        pct=units.pct,
        share=units.share,
        times=units.times,
        count=units.count,
        lines=lines,
        source_line=lambda line: shorten(line, 200),
        web_link=_web_link,
    )
    return environment


def _finalize(value: Any) -> Any:
    """The last word on every value that a template prints, should a filter be forgotten."""
    if value is None:
        return units.UNKNOWN
    if isinstance(value, str) and not isinstance(value, Markup | Undefined):
        return inert(value, keep="\n\t")
    return value


def _prose(text: str, limit: int) -> Markup:
    """A sentence in which what is between backticks, and any option, is set as code."""
    pieces, end = [], 0
    shown = sentence(text, limit)
    for found in _CODE.finditer(shown):
        pieces.append(escape(shown[end : found.start()]))
        pieces.append(Markup("<code>{}</code>").format(found[1] or found[2]))
        end = found.end()
    return Markup("").join([*pieces, escape(shown[end:])])


def _web_link(address: str) -> bool:
    """Whether a finding of this package links there; any other address is shown as text."""
    if address in PAGES:
        return True
    from recompute_scan.diagnose.outcome import HANGS, IN_RUNS, SIGNATURES  # noqa: PLC0415 - slow

    return any(address == one.sources[0] for one in (*SIGNATURES, *IN_RUNS, *HANGS))


def _asset(name: str) -> Markup:
    """One of our style sheets or scripts, put into the page without its indentation."""
    source = (_HERE / "templates" / name).read_text(encoding="utf-8")
    return Markup(_INDENTATION.sub("", source))  # noqa: S704 - a file of this package


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Spreadsheets take a cell that begins so for a formula, whoever wrote it.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")

_COLUMNS = (
    "ordinal module module_class forward_runs_per_step recompute_runs_per_backward mean_recompute "
    "forward_ms_per_step recompute_ms_per_step redundant_ms_per_step"
).split()


def regions_csv(result: Result) -> str:
    """The table of blocks as CSV, a header line first; text can start no formula.

    Numbers are as the result has them (ms, runs); ``checkpoints`` are ``variant call site``,
    outermost first, separated by `` > ``.
    """
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow((*_COLUMNS, "checkpoints"))
    for region in result.regions:
        asked = " > ".join(
            " ".join(part for part in (each.variant, each.call_site) if part)
            for each in region.checkpoints
        )
        table.writerow([cell(getattr(region, name)) for name in _COLUMNS] + [cell(asked)])
    return written.getvalue()


def cell(value: object) -> object:
    """A value as a CSV cell: text is made visible and can start no formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    shown = inert(value)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def proof_trace(proof: Proof) -> str:
    """The enlarged block as a trace that Perfetto and chrome://tracing open.

    Each lane is a thread, in the order of the page; times are the recorded trace's, in µs.
    The format is Chrome's Trace Event Format.
    """
    events: list[dict[str, object]] = []
    for number, lane in enumerate(proof.lanes):
        place = {"pid": 1, "tid": number + 1}
        named = ("thread_name", {"name": inert(lane.label)})
        sorted_by = ("thread_sort_index", {"sort_index": number})
        for name, args in (named, sorted_by):
            events.append({"ph": "M", "name": name, **place, "args": args})
        events.extend(
            {
                "ph": "X",
                "name": inert(op.name),
                "cat": inert(op.family),
                **place,
                "ts": op.start_us,
                "dur": op.duration_us,
            }
            for op in lane.ops
        )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}).decode()
