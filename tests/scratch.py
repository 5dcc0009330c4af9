"""A copy of the package to change, and what it prints then."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import recompute_scan


def copy_package(folder: Path) -> Path:
    """The folder of a copy of the package, to add to."""
    copy = folder / "src" / "recompute_scan"
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(Path(recompute_scan.__file__).parent, copy, ignore=ignored))


def printed(package: Path, *words: str, **environment: str) -> str:
    """What Python prints for these arguments, with the copy as the package."""
    ran = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **environment, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
