"""Makes the wheel small: the texts of the package and of its pages are one file in it, its modules
are without comments, and all is compressed as far as deflate goes
(``docs/decisions/small-wheel.md``).
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import zstandard
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# By the folder that their names begin at; ``recompute_scan/package_texts.py`` reads them.
_TEXTS = {
    "src/recompute_scan": ("report/*/*.html", "report/*/*.css", "report/*/*.js", "bundle/*.txt"),
    ".": ("docs/findings/RS*.md", "docs/messages.md"),
}

# Pages of which the package reads some parts alone. Those of failures it makes itself, from what it
# knows of each and from what logs say, which is in the page; of the messages, it shows one by one.
_PARTS = {
    r"docs/findings/RS[12]\d\d\.md": r"^#{1,2} |^```text\n.*?^```$",
    r"docs/messages\.md": r"^### E.*?(?=\n#{2,3} |\Z)",
}


def shipped(name: str, text: str) -> str:
    """What of a text goes into the wheel."""
    for names, part in _PARTS.items():
        if re.fullmatch(names, name):
            return "\n".join(re.findall(part, text, re.DOTALL | re.MULTILINE))
    if name.endswith((".css", ".js")):  # as they are but for indentation and comments
        lines = (line.strip() for line in text.splitlines())
        return "\n".join(line for line in lines if line and not line.startswith("//"))
    return text


def without_comments(source: bytes) -> bytes:
    """The module, line for line, so that a traceback names the lines of the repository."""
    lines = source.decode().splitlines(keepends=True)
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    found = "".join(lines).encode()
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(source))
    return found


def compress(wheel: Path) -> None:
    """Write it anew, entry by entry, smaller."""
    import zopfli  # noqa: PLC0415 - an editable checkout does without

    smaller = wheel.with_suffix(".smaller")
    recorded: dict[str, str] = {}
    with (
        zipfile.ZipFile(wheel) as before,
        zopfli.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for entry in before.infolist():  # RECORD is the last
            data, name = before.read(entry), entry.filename
            if name.endswith(".py"):
                data = without_comments(data)
                digest = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                recorded[name] = f"{name},sha256={digest},{len(data)}"
            elif name.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines()
                data = "".join(f"{recorded.get(x.split(',')[0], x)}\n" for x in lines).encode()
            after.writestr(entry, data)
    smaller.replace(wheel)


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
                name = path.relative_to(base).as_posix()
                texts[name] = shipped(name, path.read_text(encoding="utf-8"))
        data = "\0".join(part for named in texts.items() for part in named).encode()
        packed = zstandard.ZstdCompressor(level=22).compress(data)
        target = Path(self.root, "build", "texts.zst")
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(packed)
        build_data["force_include"][str(target)] = "recompute_scan/texts.zst"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called with the wheel that was written."""
        if version == "standard":
            compress(Path(artifact_path))
