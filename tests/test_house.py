"""The source stays inside its budget, and the count sees what it counts."""

from pathlib import Path

from tests.house import LIMITS, House


def test_the_source_stays_inside_its_budget() -> None:
    house = House()
    counted = {name: len(found) for name, found in house.figures().items()} | house.lines()
    over = {name: counted[name] for name, (limit, _) in LIMITS.items() if counted[name] > limit}
    assert not over


def test_a_house_with_every_fault(tmp_path: Path) -> None:
    package = tmp_path / "src" / "recompute_scan"
    for folder in ("", "trace", "cost"):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("")
    long = "def f(a, b, c, d, e, g, h, i):\n" + "    a += 1\n" * 60
    (package / "trace" / "said.py").write_text("from recompute_scan.cost import calls\n" + long)
    (package / "trace" / "calls.py").write_text("x = 1\n" * 701)
    (package / "cost" / "calls.py").write_text("from recompute_scan.trace.said import f\n")
    figures = House(tmp_path).figures()
    assert figures["modules over 700 lines"] == ["trace/calls.py"]
    assert figures["modules with a banned name"] == ["trace/said.py"]
    assert len(figures["modules with a name of another, outside lists"]) == 2
    assert figures["functions over 60 lines"] == ["trace/said.py:2 f"]
    assert figures["functions with more than 7 parameters"] == ["trace/said.py:2 f"]
    assert figures["circles of imports"]
    assert figures["modules that one other imports, outside lists"] == [
        "cost/calls.py",
        "trace/said.py",
    ]
