"""The change to the user's file as a unified diff that `git apply` and `patch` take."""

from __future__ import annotations

from recompute_scan.run_info import Source


def removal_diff(site: str, source: Source) -> str:
    """A diff that deletes one statement from the file of ``site`` (``file:line``).

    Where the statement is all that its block holds, ``pass`` takes its place.
    """
    path = site.rpartition(":")[0]
    lines = source.text.split("\n")
    before = lines[: source.begin - source.first]
    removed = lines[source.begin - source.first : source.end - source.first + 1]
    after = lines[source.end - source.first + 1 :]
    indent = removed[0][: len(removed[0]) - len(removed[0].lstrip())]
    added = [f"{indent}pass"] if source.alone else []
    old, new = len(lines), len(lines) - len(removed) + len(added)
    # A range of no lines is given by the line before it.
    new_first = source.first if new else source.first - 1
    body = (
        [f" {line}" for line in before]
        + [f"-{line}" for line in removed]
        + [f"+{line}" for line in added]
        + [f" {line}" for line in after]
    )
    # An absolute path stays as it is; `a/` and `b/` are for paths below the current folder.
    old_name, new_name = (path, path) if path.startswith("/") else (f"a/{path}", f"b/{path}")
    header = [
        f"--- {old_name}",
        f"+++ {new_name}",
        f"@@ -{source.first},{old} +{new_first},{new} @@",
    ]
    return "\n".join([*header, *body]) + "\n"
