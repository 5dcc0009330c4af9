"""Call sites as package-relative paths: ``transformers/modeling_utils.py:31``, ``train.py:7``."""

from __future__ import annotations

import re

from recompute_scan.frameworks.known import import_names

# Packages whose name stays under --strict too. Their files' names do not: a fork has its own.
PUBLIC_PACKAGES = frozenset({"torch"}) | import_names()
_SITE = re.compile(r"(.{1,4000}):(\d{1,7})", re.DOTALL)
_ALIAS = re.compile(r"(?:(\w{1,99})/)?private_file_\d{1,9}\.py:\d{1,7}")
_PART = re.compile(r"[A-Za-z0-9_][\w.\-]{0,99}")
_INSTALLED = ("site-packages", "dist-packages")
# Folders of the root below which people's files are: of a run that is started in the root, as in a
# container, call sites are relative to it.
_BELOW_ROOT = frozenset(
    "home users root mnt media tmp var private volumes opt srv usr etc scratch lustre gpfs nfs net "
    "export fsx efs dbfs kaggle proc".split()
)


class Places:
    """One alias a file, the same wherever it is named.

    Args:
        strict: Whether files of the script's own get aliases.

    Attributes:
        kept: Paths that stay.
        given: Aliases by path; never written into the archive.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.kept: set[str] = set()
        self.given: dict[str, str] = {}
        self._number = 0

    def reserve(self, number: int) -> None:
        """Keep clear of the aliases up to this one: they are from an earlier bundle."""
        self._number = max(self._number, number)

    def site(self, site: str) -> str:
        """``file:line`` without what stands above the package; empty where it is no site."""
        alias = _ALIAS.fullmatch(site)
        if alias and (alias[1] is None or alias[1] in PUBLIC_PACKAGES):
            return site
        found = _SITE.fullmatch(site)
        return f"{self._file(found[1])}:{found[2]}" if found else ""

    def _file(self, path: str) -> str:
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        for marker in _INSTALLED:
            if marker in parts:
                parts = parts[len(parts) - parts[::-1].index(marker) :]
                break
        else:
            # Folders outside the project tell who somebody is, and where they work.
            absolute = path.startswith(("/", "\\", "~")) or path[1:2] == ":"
            if absolute or ".." in parts or (parts[0:1] and parts[0].lower() in _BELOW_ROOT):
                parts = parts[-1:]
        if self.strict or not parts or not all(_PART.fullmatch(part) for part in parts):
            if path not in self.given:
                self._number += 1
                package = f"{parts[0]}/" if parts and parts[0] in PUBLIC_PACKAGES else ""
                self.given[path] = f"{package}private_file_{self._number}.py"
            return self.given[path]
        short = "/".join(parts)
        self.kept.add(short)
        return short
