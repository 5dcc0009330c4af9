"""The list of torch's own operators that ships with the package.

``python -m tests.share.operators`` writes it to standard output; it is
``src/recompute_scan/bundle/operators.txt``.
"""

import torch

from recompute_scan.bundle.names import ENDINGS


def operators() -> dict[str, list[str]]:
    """Names of all operators that torch registers, without overloads, by library."""
    names = set(torch._C._dispatch_get_all_op_names())
    names |= {schema.name for schema in torch._C._jit_get_all_schemas()}
    found: dict[str, list[str]] = {}
    for name in sorted({name.partition(".")[0] for name in names}):
        library, _, own = name.partition("::")
        found.setdefault(library, []).append(own)
    return found


def words(names: list[str]) -> list[str]:
    """Each name with marks for those that are it with an ending, which are left out."""
    all_of_them = set(names)
    ended = {name + ending for name in names for ending in ENDINGS.values()} & all_of_them
    # What is left out cannot itself bear marks: a name with two endings keeps its own word.
    kept = [name for name in names if name not in ended or _stem(name, all_of_them) in ended]
    return [
        name + "".join(mark for mark, ending in ENDINGS.items() if name + ending in all_of_them)
        for name in kept
    ]


def _stem(name: str, names: set[str]) -> str:
    """The longest name that this one is with an ending."""
    stems = (name.removesuffix(ending) for ending in ENDINGS.values() if name.endswith(ending))
    return max((stem for stem in stems if stem in names), key=len, default="")


if __name__ == "__main__":
    print("# Operators that torch and its libraries define: python -m tests.share.operators")
    for library, names in operators().items():
        print(f"{library}:: {' '.join(words(names))}")
