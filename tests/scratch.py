"""A copy of the package to change, and what it prints then."""

import shutil
from pathlib import Path

import recompute_scan
from tests.record.runs import run_plain


def copy_package(folder: Path) -> Path:
    """The folder of a copy of the package, to add to."""
    copy = folder / "src" / "recompute_scan"
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(Path(recompute_scan.__file__).parent, copy, ignore=ignored))


def printed(package: Path, *words: str, **environment: str) -> str:
    """What Python prints for these arguments, with the copy as the package."""
    ran = run_plain(package.parent, *words, PYTHONPATH=str(package.parent), **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
