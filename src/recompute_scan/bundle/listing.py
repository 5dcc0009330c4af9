"""What goes into an archive, listed for the person who is about to share it."""

from __future__ import annotations

from collections.abc import Iterator

from recompute_scan.bundle.pack import Archive
from recompute_scan.report.escape import visible


def listing(contents: Archive, *, every_name: bool) -> Iterator[str]:
    """Lines on what is in the archive, safe to print.

    Args:
        contents: What goes in.
        every_name: Whether to list every name that stays or is replaced, or to count them.
    """
    yield f"What goes in ({contents.size:,} bytes packed):"
    for name, packed, unpacked in contents.members:
        yield f"  {name:20} {packed:>12,} bytes packed {unpacked:>14,} unpacked"
    result = contents.after
    runs = result.recompute_per_backward
    counted = "" if runs is None else f", {runs:g} recomputes per backward"
    yield f"Verdict of the archive: {result.verdict}{counted}"
    for sentence in contents.differences:
        yield f"  differs from the original: {visible(sentence, 300)}"
    for sentence in contents.untold:
        yield f"  not in the archive: {sentence}"
    for phrase in contents.dropped:
        yield f"  left out to make it small: {phrase}"
    if result.environment:
        yield "Versions and devices that go in:"
        for name, value in result.environment.items():
            yield f"  {visible(name)}: {visible(value)}"
    for title, names in (
        ("Names that stay", contents.kept),
        ("Names that are replaced", [f"{name} -> {alias}" for name, alias in contents.aliases]),
    ):
        if every_name and names:
            yield f"{title} ({len(names)}):"
            for name in names:
                yield f"  {visible(name, 200)}"
        else:
            yield f"{title}: {len(names)}" + (" (--show lists them)" if names else "")
