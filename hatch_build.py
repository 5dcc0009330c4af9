"""Puts the pages of findings and messages into the wheel as one file, half as large as many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for every wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file, and have it taken in; a checkout that is edited reads the pages."""
        if version != "standard":
            return
        root = Path(self.root)
        pages = sorted((root / "docs" / "findings").glob("RS*.md"))
        pages.append(root / "docs" / "messages.md")
        target = root / "build" / "pages.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text("\n".join(one.read_text(encoding="utf-8") for one in pages), "utf-8")
        build_data["force_include"][str(target)] = "recompute_scan/pages.md"
