"""How Sphinx turns these pages into a site: ``make docs``. The pages read as well on their own."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from recompute_scan import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "recompute-scan"
author = "the recompute-scan developers"
project_copyright = "the recompute-scan developers"
release = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
copybutton_exclude = ".linenos, .gp, .go"
# Links to `page.md#heading`, as other renderers of Markdown make them.
myst_heading_anchors = 3

html_theme = "furo"
html_title = "recompute-scan"
html_static_path = ["_static"]
html_js_files = ["filter.js"]

# Words that people search for and that few titles have. They become index entries, which the site's
# search ranks above titles and text.
SEARCHED = {
    "findings/RS001": ("slow training", "training is slow", "double recompute"),
    "findings/RS101": ("CheckpointError", "recomputed values have different metadata"),
    "findings/RS120": ("CUDA out of memory", "out of memory", "OOM"),
    "findings/RS209": ("NCCL timeout", "watchdog timeout"),
    "findings/index": ("error text", "error code"),
    "diagnoses": ("crash", "hang", "stuck training"),
    "how-well-it-works": ("accuracy", "benchmark", "limits"),
    "launchers": ("torchrun", "Slurm", "multiple nodes"),
    "plan": ("save memory", "memory budget"),
    "python-api": ("notebook", "Jupyter", "callback"),
    "recording": ("install", "overhead"),
}

_REPOSITORY = "https://github.com/recompute-scan/recompute-scan/blob/main/"
_LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")


def _leave_the_docs(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files of the repository that are no pages lead to the repository."""

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), found[1]))
        return found[0] if path.startswith("docs/") else f"]({_REPOSITORY}{path})"

    source[0] = _LINK.sub(target, source[0])


def _add_pages_below(app: Sphinx, page: str, source: list[str]) -> None:
    """The pages that a list names, which the sidebar shows below it when it is opened."""
    for index, pages in {"findings/index": "RS*", "decisions/index": "0*"}.items():
        if page == index:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def _add_index_entries(app: Sphinx, page: str, source: list[str]) -> None:
    """Index entries below the title."""
    if words := SEARCHED.get(page):
        title, _, rest = source[0].partition("\n")
        entries = "".join(f"\n```{{index}} ! {word}\n```\n" for word in words)
        source[0] = f"{title}\n{entries}{rest}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _leave_the_docs)
    app.connect("source-read", _add_pages_below)
    app.connect("source-read", _add_index_entries)
