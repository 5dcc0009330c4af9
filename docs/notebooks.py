"""Runs the notebooks and stores them with what their cells gave: ``python docs/notebooks.py``.

So they can be read where nothing runs, on a forge's web page; a test runs them again and compares.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_TIMEOUT_S = 600


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


def outputs(notebook: Any) -> list[list[Mapping[str, Any]]]:
    """What each code cell gave."""
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def main() -> None:
    """Write every notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
