"""Templates filled: every value escaped, and a page that may run nothing but our own.

Style and script are in the page and allowed by their hashes only; everything else is
refused by the content policy, so that even a name that slipped through could do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from recompute_scan import units
from recompute_scan.report import words
from recompute_scan.report.escape import lines, sentence, shorten, visible
from recompute_scan.terminal import inert

_INDENTATION = re.compile(r"^ +", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`|(?<!\S)(--[a-z][a-z-]*)(?![\w-])")


def fill(template: str, **values: Any) -> str:
    """A page of ours: the template with our style, our script, and a policy that allows no other.

    Args:
        template: Name of a file in ``templates/``.
        values: What it shows, beside words and units, which every template has.
    """
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
        loader=FunctionLoader(_source),
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


def _source(name: str) -> str | None:
    """A template's text; ``None`` where there is none."""
    here = Path(__file__).parent
    paths = (here / folder / name for folder in ("templates", "sections"))
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)


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
    """Whether text is an address that may become a link; anything else is shown as text."""
    return address.startswith("https://") and inert(address) == address and " " not in address


def _asset(name: str) -> Markup:
    """A style sheet or script of our own, put into the page without its indentation."""
    loader = _environment().loader
    assert loader is not None
    source, _, _ = loader.get_source(_environment(), name)
    return Markup(_INDENTATION.sub("", source))  # noqa: S704 - a file of this package


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
