"""How Sphinx turns these pages into a site: ``make docs``. The pages read as well on their own."""

import posixpath
import re

from sphinx.application import Sphinx

from recompute_scan import __version__

project = "recompute-scan"
author = "the recompute-scan developers"
project_copyright = "the recompute-scan developers"
release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
# Links to `page.md#heading`, as other renderers of Markdown make them.
myst_heading_anchors = 3

html_theme = "furo"
html_title = "recompute-scan"

_REPOSITORY = "https://github.com/recompute-scan/recompute-scan/blob/main/"
_LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")


def _leave_the_docs(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files of the repository that are no pages lead to the repository."""

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), found[1]))
        return found[0] if path.startswith("docs/") else f"]({_REPOSITORY}{path})"

    source[0] = _LINK.sub(target, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _leave_the_docs)
