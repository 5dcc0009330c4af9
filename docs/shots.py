"""Pictures of the report for these pages, into ``docs/img``, in what ``make browser`` installs.

The page is that of ``traces/doubled_llama_fsdp``, opened in a real Chromium (Debian's package, or
``CHROMIUM=PATH``): its first screen, then the whole story in light and dark, on a phone and on
paper. Of every other kind of page (``docs/pages``, and the comparison with the repaired twin) the
first screen alone, 1280 by 800 pixels.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from recompute_scan.analysis.pipeline import analyse
from recompute_scan.report.render import render_comparison_html, render_html
from recompute_scan.result.compare import compare

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "img"
MOST_BYTES = 300_000
COLOURS = 128
HEIGHT = 800
KINDS = (
    *("once", "partial", "ranks", "verified", "h100"),
    *("inconclusive", "crashed", "hung", "plan"),
)


@dataclass(frozen=True)
class Shot:
    """One picture: from the top of the page to the end of the section ``until``, or one screen; or
    from the top of the ``part`` with the first selector to the end of that with the second.
    ``touched`` is under the mouse.
    """

    name: str
    until: str | None
    width: int
    options: dict[str, Any]
    paper: bool = False
    part: tuple[str, str] = ("", "")
    touched: str = ""


SHOTS = (
    Shot("verdict", None, 1280, {"color_scheme": "light"}),
    Shot("report-light", "who", 1280, {"color_scheme": "light"}),
    Shot("report-dark", "who", 1280, {"color_scheme": "dark"}),
    Shot("report-phone", "proof", 360, {"color_scheme": "light", "device_scale_factor": 1.5}),
    # A4 less its margins, in CSS pixels.
    Shot("report-print", "findings", 688, {"color_scheme": "light"}, paper=True),
    Shot(
        "tour-proof",
        None,
        1280,
        {"color_scheme": "light"},
        part=("#proof figure", "#proof .op-line"),
        touched="#proof [data-name='scaled_dot_product_attention']",
    ),
)


def main() -> int:
    """Write every picture; 1 where one is larger than it may be."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print("No chromium: install Debian's package, or name one in $CHROMIUM.")
        return 1
    IMAGES.mkdir(exist_ok=True)
    status = 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder, "report.html")
        twins = ("doubled_llama_fsdp", "repaired_llama_fsdp")
        doubled, repaired = (analyse((str(ROOT / "traces" / name),)) for name in twins)
        page.write_text(render_html(doubled), "utf-8")
        compared = Path(folder, "compare.html")
        text = render_comparison_html(compare(doubled, repaired, ("doubled", "repaired")))
        compared.write_text(text, "utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = [(page.as_uri(), shot) for shot in SHOTS]
        kinds = {name: ROOT / "docs" / "pages" / f"{name}.html" for name in KINDS}
        for name, path in {**kinds, "compare": compared}.items():
            shot = Shot(f"page-{name}", None, 1280, {"color_scheme": "light"})
            pages.append((path.as_uri(), shot))
        for address, shot in pages:
            size = take(browser, address, shot)
            print(f"{shot.name}.png: {size:,} bytes")
            status |= size > MOST_BYTES
        browser.close()
    return int(status)


def take(browser: Any, address: str, shot: Shot) -> int:
    """One picture; its size in bytes."""
    viewport = {"width": shot.width, "height": HEIGHT}
    context = browser.new_context(viewport=viewport, **shot.options)
    opened = context.new_page()
    opened.goto(address)
    if shot.paper:
        opened.emulate_media(media="print")
    if shot.touched:
        opened.locator(shot.touched).first.hover()
    height = HEIGHT
    if shot.until is not None:
        height = opened.locator(f"#{shot.until}").evaluate(
            "section => Math.ceil(section.getBoundingClientRect().bottom + scrollY) + 12"
        )
    clip = {"x": 0, "y": 0, "width": shot.width, "height": height}
    if shot.part != ("", ""):
        first, last = (
            opened.locator(one).first.evaluate(
                "part => { const box = part.getBoundingClientRect();"
                " return [box.top + scrollY - 8, box.bottom + scrollY + 8]; }"
            )
            for one in shot.part
        )
        clip |= {"y": first[0], "height": last[1] - first[0]}
    picture = opened.screenshot(full_page=True, clip=clip)
    context.close()
    path = IMAGES / f"{shot.name}.png"
    # A palette takes a third of the bytes; the page has few colours.
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, kmeans=2).save(
        path, optimize=True
    )
    return path.stat().st_size


if __name__ == "__main__":
    sys.exit(main())
