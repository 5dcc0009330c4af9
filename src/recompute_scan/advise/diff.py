"""The change to the user's file as a unified diff that `git apply` and `patch` take."""

from __future__ import annotations

from collections.abc import Sequence

from recompute_scan.run_info import Source


def change_diff(site: str, source: Source, new: Sequence[str]) -> str:
    """A diff that puts ``new`` lines in the place of one statement of the file of ``site``.

    Args:
        site: The call site, ``file:line``.
        source: The statement there, with the lines round it.
        new: The lines that take its place; none to delete it.
    """
    path = site.rpartition(":")[0]
    lines = source.text.split("\n")
    before = lines[: source.begin - source.first]
    removed = lines[source.begin - source.first : source.end - source.first + 1]
    after = lines[source.end - source.first + 1 :]
    old, left = len(lines), len(lines) - len(removed) + len(new)
    # A range of no lines is given by the line before it.
    new_first = source.first if left else source.first - 1
    body = (
        [f" {line}" for line in before]
        + [f"-{line}" for line in removed]
        + [f"+{line}" for line in new]
        + [f" {line}" for line in after]
    )
    # An absolute path stays as it is; `a/` and `b/` are for paths below the current folder.
    old_name, new_name = (path, path) if path.startswith("/") else (f"a/{path}", f"b/{path}")
    header = [
        f"--- {old_name}",
        f"+++ {new_name}",
        f"@@ -{source.first},{old} +{new_first},{left} @@",
    ]
    return "\n".join([*header, *body]) + "\n"
