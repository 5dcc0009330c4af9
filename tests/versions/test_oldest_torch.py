"""Does every name that the package takes from torch exist in the oldest torch that it supports?

    python -m tests.versions.test_oldest_torch torch-2.1.2-*.whl

reads the names of those modules from a wheel and writes them into ``oldest_torch.json``. Modules
written in C++ are left out.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import recompute_scan

NAMES = Path(__file__).with_name("oldest_torch.json")


def imported() -> Iterator[tuple[str, str, str]]:
    """Each module of torch, a name that is imported from it, and where."""
    folder = Path(recompute_scan.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
                for one in node.names:
                    yield str(node.module), one.name, f"{file.relative_to(folder)}:{node.lineno}"


def names_in(wheel: zipfile.ZipFile, module: str) -> list[str]:
    """The names at the top of a module, imported ones too, and the modules in it."""
    base = module.replace(".", "/")
    files = set(wheel.namelist())
    inside = (one.removeprefix(f"{base}/") for one in files if one.startswith(f"{base}/"))
    found = {one.split("/")[0].removesuffix(".py") for one in inside}
    for file in files & {f"{base}.py", f"{base}/__init__.py"}:
        for node in ast.walk(ast.parse(wheel.read(file))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                found |= {one.asname or one.name for one in node.names}
    return sorted(one for one in found if one.isidentifier())


def test_each_name_is_in_the_oldest_torch() -> None:
    known = {module: set(names) for module, names in json.loads(NAMES.read_text()).items()}
    assert known["torch.utils._pytree"] >= {"tree_flatten"}
    missing = [
        f"{where}: {module}.{name}"
        for module, name, where in imported()
        if not module.startswith("torch._C") and name not in known.get(module, ())
    ]
    assert missing == []


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as opened:
        modules = sorted({module for module, *_ in imported() if not module.startswith("torch._C")})
        found = {module: names_in(opened, module) for module in modules}
    NAMES.write_text(json.dumps(found).replace("], ", "],\n") + "\n")
