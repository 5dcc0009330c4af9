"""Puts the texts of the package and of its pages into the wheel as one file, which is smaller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# By the folder that their names begin at; ``recompute_scan/package_texts.py`` reads them.
_TEXTS = {
    "src/recompute_scan": ("report/*/*.html", "report/*/*.css", "report/*/*.js", "bundle/*.txt"),
    ".": ("docs/findings/RS*.md", "docs/messages.md"),
}


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for every wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file, and have it taken in; a checkout that is edited has the texts."""
        if version != "standard":
            return
        texts = {}
        for folder, patterns in _TEXTS.items():
            base = Path(self.root, folder)
            for path in sorted(path for pattern in patterns for path in base.glob(pattern)):
                texts[path.relative_to(base).as_posix()] = path.read_text(encoding="utf-8")
        packed = zstandard.ZstdCompressor(level=22).compress(json.dumps(texts).encode())
        target = Path(self.root, "build", "texts.zst")
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(packed)
        build_data["force_include"][str(target)] = "recompute_scan/texts.zst"
