"""Runs the notebooks and stores them with what their cells gave: ``python docs/notebooks.py``.

So they can be read where nothing runs, on a forge's web page; a test runs them again and compares.
Plotly's figures are stored with a picture, which Chromium makes (Debian's package, or
``CHROMIUM=PATH``): Plotly's own way, kaleido, starts no browser as root, as in containers.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_TIMEOUT_S = 600
FIGURE = "application/vnd.plotly.v1+json"
_WIDTH = 876


def executed(path: Path) -> Any:
    """The notebook with fresh outputs, run in the kernel of this environment.

    Without the settings of whoever runs it: no profile, no renderer of figures but plotly's own
    type, which Jupyter draws and other places pass over.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as private:
        ours = {
            "IPYTHONDIR": f"{private}/ipython",
            "JUPYTER_PLATFORM_DIRS": "1",
            "JUPYTER_PREFER_ENV_PATH": "1",
            "JUPYTER_RUNTIME_DIR": f"{private}/runtime",
            "PLOTLY_RENDERER": "plotly_mimetype",
        }
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            NotebookClient(
                notebook,
                timeout=_TIMEOUT_S,
                kernel_name="python3",
                resources={"metadata": {"path": str(path.parent)}},
                record_timing=False,
            ).execute()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    # the version of Python that ran it says nothing of what it shows
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def add_pictures(notebook: Any) -> None:
    """Store each figure of plotly as PNG too, for pages that draw none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if FIGURE in output.get("data", {}):
                output.data["image/png"] = _picture(output.data[FIGURE])


def _picture(figure: Mapping[str, Any]) -> str:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("No chromium: install Debian's package, or name one in $CHROMIUM.")
    drawn = go.Figure(data=figure["data"], layout=figure["layout"])
    with tempfile.TemporaryDirectory() as folder:
        page, png = Path(folder, "figure.html"), Path(folder, "figure.png")
        drawn.write_html(page, config={"staticPlot": True})
        size = f"{_WIDTH},{(drawn.layout.height or 450) + 16}"
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=5000")
        subprocess.run(  # noqa: S603 - the page is made here
            [chromium, *options, f"--window-size={size}", f"--screenshot={png}", page.as_uri()],
            check=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        return base64.b64encode(png.read_bytes()).decode()


def main() -> None:
    """Write every notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = executed(path)
        add_pictures(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
