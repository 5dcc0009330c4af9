"""The list of torch's own operators that ships with the package.

``python -m tests.share.operators`` writes it to standard output; it is
``src/recompute_scan/bundle/operators.txt``.
"""

from __future__ import annotations

import torch


def operators() -> dict[str, list[str]]:
    """Names of all operators that torch registers, without overloads, by library."""
    names = set(torch._C._dispatch_get_all_op_names())
    names |= {schema.name for schema in torch._C._jit_get_all_schemas()}
    found: dict[str, list[str]] = {}
    for name in sorted({name.partition(".")[0] for name in names}):
        library, _, own = name.partition("::")
        found.setdefault(library, []).append(own)
    return found


if __name__ == "__main__":
    print("# Operators that torch and its libraries define: python -m tests.share.operators")
    for library, names in operators().items():
        print(f"{library}:: {' '.join(names)}")
