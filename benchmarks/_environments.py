"""Versions of torch with the packages of their day, and an environment made for one of them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks._frame import ROOT, TIMEOUT_S, Ran, fresh


class Version(NamedTuple):
    """A version of torch with the packages of its day.

    Attributes:
        python: Minor version of Python; from the first to the last supported, all are among them.
        packages: What pip is asked for.
        fsdp: Whether FSDP runs on a CPU; in 2.1 it asks for a GPU's streams.
    """

    name: str
    python: str
    packages: tuple[str, ...]
    fsdp: bool = True


def _of(name: str, python: str, packages: str, *, fsdp: bool = True) -> Version:
    return Version(name, python, tuple(packages.split()), fsdp)


VERSIONS = (
    _of("2.1", "3.10", "torch==2.1.2 transformers==4.45.2 accelerate==0.34.2 numpy<2", fsdp=False),
    _of("2.2", "3.11", "torch==2.2.2 transformers==4.45.2 accelerate==0.34.2 numpy<2"),
    _of("2.3", "3.10", "torch==2.3.1 transformers==4.40.2 accelerate==0.30.1 numpy<2"),
    _of("2.4", "3.12", "torch==2.4.1 transformers==4.46.3 accelerate==0.34.2"),
    _of("2.6", "3.13", "torch==2.6.0 transformers==4.51.3 accelerate==1.6.0"),
    _of("2.8", "3.12", "torch==2.8.0 transformers==4.55.4 accelerate==1.10.1"),
    _of("2.10", "3.10", "torch==2.10.0 transformers==4.57.3 accelerate"),
    _of("2.13", "3.13", "torch==2.13.0 transformers>=5 accelerate"),
    _of("newest", "3.12", "torch transformers>=5 accelerate"),
)


class Environment:
    """A virtual environment that is removed again.

    Args:
        folder: Where it is made.
        scratch: Where programs run.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder = folder
        self.scratch = scratch
        self.python = str(folder / "bin" / "python")

    def make(self, packages: Sequence[str], python: str) -> Ran:
        """Torch first, so that its pin is met; then this project with all that it needs."""
        self.remove()
        subprocess.run([_interpreter(python), "-m", "venv", str(self._folder)], check=True)
        self.scratch.mkdir(parents=True)
        install = (self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
        pins = [package for package in packages if package.startswith("numpy")]
        return self.run([*install, *packages, f"{ROOT}[torch]", *pins], timeout_s=3600)

    def run(
        self,
        command: Sequence[str],
        *,
        folder: str = ".",
        timeout_s: float = TIMEOUT_S,
        variables: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a program in a folder of the scratch one, without the checkout's packages."""
        where = self.scratch / folder
        where.mkdir(parents=True, exist_ok=True)
        set_too = {"PYTHONPATH": "", **(variables or {})}
        return fresh(command, folder=where, timeout_s=timeout_s, variables=set_too)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _interpreter(python: str) -> str:
    """Of that minor version if there is one, in ``PATH`` or pyenv's; else this one."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = (str(path) for path in versions.glob(f"{python}.*/bin/python{python}"))
    for candidate in (shutil.which(f"python{python}"), *found):
        # A shim of pyenv's is there and ends with an error.
        if candidate is None:
            continue
        tried = subprocess.run([candidate, "-c", ""], capture_output=True, check=False)
        if not tried.returncode:
            return candidate
    return sys.executable
