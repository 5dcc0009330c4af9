"""The list of torch's own operators that ships with the package.

``python -m tests.share.operators`` writes it to standard output; it is
``src/recompute_scan/bundle/operators.txt``.
"""

from __future__ import annotations

import torch


def operators() -> list[str]:
    """Names of all operators that torch registers, without overloads."""
    names = set(torch._C._dispatch_get_all_op_names())
    names |= {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted({name.partition(".")[0] for name in names})


if __name__ == "__main__":
    print("# Operators that torch and its libraries define: python -m tests.share.operators")
    print("\n".join(operators()))
