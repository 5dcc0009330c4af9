"""``fix``: what it writes, byte by byte, and what it leaves alone."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from recompute_scan.advise.choice import edited, turned_off
from recompute_scan.cli import main
from recompute_scan.errors import InputError
from recompute_scan.frameworks.base import Edit
from recompute_scan.frameworks.registry import MECHANISMS
from recompute_scan.record.attribution import statement_at
from recompute_scan.result import Checkpoint, Finding, Fix, Result, to_json
from recompute_scan.result import patch as patches
from recompute_scan.result.patch import change_diff
from tests.present import present
from tests.report.sample_results import doubled

ENABLE = Edit("enable", "delete")
SCRIPT = """\
import torch

model = build()
model.enable(kwargs={"use_reentrant": True})
wrap(model)
train(model)
"""


def finding(
    root: Path, name: str, line: int, edits: Sequence[Edit] = (ENABLE,), *, shown: str = ""
) -> Finding:
    """What the analysis says of a line, from the file as it is."""
    source = present(statement_at(root / name, line))
    new = present(edited(source, edits))
    base = doubled().findings[0]
    diff = change_diff(f"{shown or name}:{line}", source, new)
    fix = structs.replace(present(base.fix), diff=diff, digest=source.digest, removes=None)
    return structs.replace(base, fix=fix)


def result_with(*findings: Finding) -> Result:
    return structs.replace(doubled(), findings=findings, regions=())


def written(folder: Path, result: Result) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(to_json(result))
    return folder


def with_diff(diff: str, digest: str | None = None) -> Result:
    base = doubled().findings[0]
    fix = structs.replace(present(base.fix), diff=diff, digest=digest, removes=None)
    return result_with(structs.replace(base, fix=fix))


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and "out" not in path.relative_to(folder).parts
    }


# Name, the file before, the line of the call, the file after: what a person would have made of it.
WHOLE = SCRIPT.encode()
GONE = WHOLE.replace(b'model.enable(kwargs={"use_reentrant": True})\n', b"")
SHAPES: dict[str, tuple[bytes, int, bytes]] = {
    "plain": (WHOLE, 4, GONE),
    "crlf": (WHOLE.replace(b"\n", b"\r\n"), 4, GONE.replace(b"\n", b"\r\n")),
    "cr": (WHOLE.replace(b"\n", b"\r"), 4, GONE.replace(b"\n", b"\r")),
    "mixed": (
        WHOLE.replace(b"build()\n", b"build()\r\n").replace(b"wrap(model)\n", b"wrap(model)\r\n"),
        4,
        GONE.replace(b"build()\n", b"build()\r\n").replace(b"wrap(model)\n", b"wrap(model)\r\n"),
    ),
    "bom": (b"\xef\xbb\xbf" + WHOLE, 4, b"\xef\xbb\xbf" + GONE),
    "bom and crlf, at the top": (
        b"\xef\xbb\xbfmodel.enable()\r\nx = 1\r\n",
        1,
        b"\xef\xbb\xbfx = 1\r\n",
    ),
    "latin-1": (
        b"# -*- coding: latin-1 -*-\nx = '\xe4\xf6'\nmodel.enable()  # \xfc\ny = '\xdf'\n",
        3,
        b"# -*- coding: latin-1 -*-\nx = '\xe4\xf6'\ny = '\xdf'\n",
    ),
    "utf-8": (
        "x = 'ä→😀'\nmodel.enable()  # ü\ny = '\u2028'\n".encode(),
        2,
        "x = 'ä→😀'\ny = '\u2028'\n".encode(),
    ),
    "shift-jis": (
        "# coding: shift_jis\nx = 'ソ表'\nmodel.enable()\ny = '能'\n".encode("shift_jis"),
        3,
        "# coding: shift_jis\nx = 'ソ表'\ny = '能'\n".encode("shift_jis"),
    ),
    "tabs": (
        b"if 1:\n\tx = 1\n\tmodel.enable()\n\ty\t=\t2\n",
        3,
        b"if 1:\n\tx = 1\n\ty\t=\t2\n",
    ),
    "only statement": (
        b"if 1:\r\n\tmodel.enable(\r\n\t\t1,\r\n\t)\r\ny = 2\r\n",
        2,
        b"if 1:\r\n\tpass\r\ny = 2\r\n",
    ),
    "no end, kept": (b"x = 1\nmodel.enable()\ny = 2", 2, b"x = 1\ny = 2"),
    "no end, the last line": (b"x = 1\nmodel.enable()", 2, b"x = 1"),
    "no end, crlf, pass": (b"if 1:\r\n  model.enable()", 2, b"if 1:\r\n  pass"),
    "all there is": (b"model.enable()\n", 1, b""),
    "form feed": (b"x = 1\n\x0c\nmodel.enable()\ny = 2\n", 3, b"x = 1\n\x0c\ny = 2\n"),
    "several lines": (
        b"x = 1\nmodel.enable(\n    # why\n    a=1,\n)\ny = 2\n",
        2,
        b"x = 1\ny = 2\n",
    ),
}
NAMES = ("train.py", "sub/a b.py", "sub/ü.py", 'q"uote.py', "back\\slash.py", "new\nline.py", "run")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_is_changed_where_the_fix_says_and_put_back(
    inside: Path, capsys: pytest.CaptureFixture[str], shape: str
) -> None:
    before, line, after = SHAPES[shape]
    script = inside / "train.py"
    script.write_bytes(before)
    script.chmod(0o751)
    folder = written(inside / "out", result_with(finding(inside, "train.py", line)))
    there = everything_in(inside)
    assert main(["fix", str(folder)]) == 0
    assert everything_in(inside) == there
    assert main(["fix", str(folder), "--apply", "--yes"]) == 0
    assert script.read_bytes() == after
    changed = everything_in(inside)
    assert {**changed, "train.py": there["train.py"]} == there
    assert changed["train.py"][0] == there["train.py"][0]
    assert before in [one.read_bytes() for one in folder.iterdir()]
    assert main(["fix", str(folder), "--apply", "--yes"]) == 0  # it is applied already
    assert script.read_bytes() == after
    assert main(["fix", str(folder), "--revert"]) == 0
    assert everything_in(inside) == there
    assert sorted(one.name for one in folder.iterdir()) == ["result.json"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_git_and_patch_make_the_same_of_the_patch(tmp_path: Path, shape: str, name: str) -> None:
    before, line, after = SHAPES[shape]
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_bytes(before)
    result = result_with(finding(tmp_path, name, line))
    fix = present(patches.patch(result, tmp_path))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for words in (["--check"], []):
        subprocess.run(["git", "apply", *words], input=fix, cwd=tmp_path, check=True)
    # of a file that becomes empty git takes an empty file, or none
    assert (script.read_bytes() if script.exists() else b"") == after
    if name not in ("new\nline.py", "back\\slash.py") and after and shutil.which("patch"):
        script.write_bytes(before)
        subprocess.run(["patch", "-p1", "--binary", "-s"], input=fix, cwd=tmp_path, check=True)
        assert script.read_bytes() == after
    script.write_bytes(before)
    (one,) = patches.changed(result, tmp_path)
    assert (one.path, one.after) == (script, after)


def test_settings_are_set_and_calls_unwrapped(tmp_path: Path) -> None:
    for before, edits, after in (
        ("f(model, use_reentrant=True)", [Edit("f", "keyword", "use_reentrant", "False")],
         "f(model, use_reentrant=False)"),
        ("x = wrapper(block(1), 2)", [Edit("wrapper", "unwrap")], "x = block(1)"),
        ("x = checkpoint(block, y, use_reentrant=True)", [Edit("checkpoint", "call")],
         "x = block(y)"),
        ("T(a=1)", [Edit("T", "keyword", "gradient_checkpointing", add=True)],
         "T(a=1, gradient_checkpointing=False)"),
    ):  # fmt: skip
        (tmp_path / "x.py").write_text(f"{before}\n")
        (one,) = patches.changed(result_with(finding(tmp_path, "x.py", 1, edits)), tmp_path)
        assert one.after.decode() == f"{after}\n"


def test_every_edit_of_every_framework_may_be_applied(tmp_path: Path) -> None:
    """What the advice can write is never refused for the words that it brings in."""
    tried = 0
    for mechanism in MECHANISMS:
        for edit in mechanism.edits:
            call = edit.call if edit.call != "*" else "anything"
            inner = {
                "delete": "",
                "unwrap": "block, 1",
                "call": "block, 1",
                "keyword": f"a, {edit.name}=1",
                "entry": f"a, b={{{edit.name!r}: 1}}",
            }[edit.how]
            lead = "x = " if edit.how in ("unwrap", "call") else ""
            (tmp_path / "x.py").write_text(f"{lead}{call}({inner})\ny = 1\n")
            (one,) = patches.changed(result_with(finding(tmp_path, "x.py", 1, [edit])), tmp_path)
            assert one.after != one.before
            tried += 1
    assert tried > 20


SWITCH = "gradient_checkpointing"


@pytest.mark.parametrize(
    ("name", "before", "on", "off"),
    [
        ("c.yaml", f"lr: 1\ntrain:\n  {SWITCH}: true  # memory\n", "true", "false"),
        ("c.yml", f"{SWITCH}: Yes\r\nlr: 1\r\n", "Yes", "No"),
        ("c.json", f'{{\n  "token": "x",\n  "{SWITCH}": true,\n  "a": 1\n}}', "true", "false"),
        ("c.toml", f'name = "é"\n{SWITCH} = true\n', "true", "false"),
        ("c.ini", f"[train]\n{SWITCH}=1\n", "1", "0"),
        ("c.yaml", f"{SWITCH}: full\n", "", ""),
        ("c.yaml", f"{SWITCH}: 1.5\n", "", ""),
        ("c.json", f'{{"token": "x", "{SWITCH}": true}}', "", ""),
        ("c.yaml", f"use_{SWITCH}: true\n", "", ""),
    ],
)
def test_a_switch_in_a_configuration_goes_off(
    tmp_path: Path, name: str, before: str, on: str, off: str
) -> None:
    (tmp_path / name).write_bytes(before.encode())
    line = before[: before.index(SWITCH)].count("\n") + 1
    source = statement_at(tmp_path / name, line)
    new = turned_off(source, [Edit("T", "keyword", SWITCH)]) if source else None
    assert source is None or source.text == before.splitlines()[line - 1]  # no secret around it
    assert (new is None) == (not on)
    if source is None or new is None:
        return
    diff = change_diff(f"{name}:{line}", source, new)
    (one,) = patches.changed(with_diff(diff, source.digest), tmp_path)
    assert one.after.decode() == before.replace(on, off)
    patches.apply([one], tmp_path)
    switched_on = diff.replace("\n-", "\n?").replace("\n+", "\n-").replace("\n?", "\n+")
    for other in (diff.replace(f"\n+{new[0]}", f"\n+{new[0]} x"), switched_on):
        with pytest.raises(InputError):
            patches.changed(with_diff(other), tmp_path)


TWO = "a = 1\nmodel.enable()\nother.enable()\nb = 2\nthird.enable()\n"


def test_neighbours_in_one_file_and_another_file_go_together(tmp_path: Path) -> None:
    for name in ("x.py", "y.py"):
        (tmp_path / name).write_text(TWO)
    several = [finding(tmp_path, "x.py", 2), finding(tmp_path, "x.py", 3)]
    several += [finding(tmp_path, "x.py", 3), finding(tmp_path, "y.py", 5)]
    result = result_with(*several)
    one, other = patches.changed(result, tmp_path)
    assert one.after == b"a = 1\nb = 2\nthird.enable()\n"
    assert other.after == b"a = 1\nmodel.enable()\nother.enable()\nb = 2\n"
    subprocess.run(
        ["git", "apply", "-"], input=patches.patch(result, tmp_path), cwd=tmp_path, check=True
    )
    assert ((tmp_path / "x.py").read_bytes(), (tmp_path / "y.py").read_bytes()) == (
        one.after,
        other.after,
    )


def test_two_that_change_one_line_are_not_put_together(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("f(model, use_reentrant=True, enabled=True)\nb = 2\n")
    first = finding(tmp_path, "x.py", 1, [Edit("f", "keyword", "use_reentrant", "False")])
    second = finding(tmp_path, "x.py", 1, [Edit("f", "keyword", "enabled", "False")])
    assert patches.fixes(result_with(first, second)) == (first,)


def test_a_block_never_loses_all_its_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TWO)
    result = doubled()
    region = result.regions[0]
    outer, inner = region.checkpoints[:2]

    def taking(line: int, gone: Checkpoint) -> Finding:
        one = finding(tmp_path, "x.py", line)
        return structs.replace(one, fix=structs.replace(present(one.fix), removes=gone))

    first, second = taking(2, outer), taking(3, inner)
    both = structs.replace(result_with(first, second), regions=(region,))
    assert patches.fixes(both) == (first,)
    again = structs.replace(both, findings=(first, taking(3, outer)))
    assert len(patches.fixes(again)) == 2


def test_what_the_verdict_rests_on_leads(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TWO)
    one, other = finding(tmp_path, "x.py", 2), finding(tmp_path, "x.py", 3)
    policy = structs.replace(one, code="RS501")
    assert patches.fixes(result_with(other, policy)) == (other,)
    assert patches.fixes(structs.replace(result_with(policy), verdict="full")) == (policy,)
    assert patches.patch(structs.replace(doubled(), findings=()), tmp_path) is None


def refused(result: Result, root: Path, code: str) -> InputError:
    there = everything_in(root)
    with pytest.raises(InputError) as caught:
        patches.apply(patches.changed(result, root), root)
    assert caught.value.code == code
    assert everything_in(root) == there
    return caught.value


@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize(
    ("change", "without_digest"),
    [
        (lambda text: text.replace("wrap(model)", "wrap(model) "), True),
        (lambda text: text.replace("True", "False"), True),
        (lambda text: "\n" + text, True),
        (lambda text: text.replace("import torch\n", ""), True),
        (lambda _: "", True),
        (lambda text: text + "more()\n" * 9, False),
    ],
)
def test_a_file_that_changed_since_is_left_alone(
    tmp_path: Path, digest: bool, change: Callable[[str], str], without_digest: bool
) -> None:
    (tmp_path / "x.py").write_text(SCRIPT)
    one = finding(tmp_path, "x.py", 4)
    assert one.fix is not None
    assert one.fix.digest == sha256(SCRIPT.encode()).hexdigest()
    if not digest:
        one = structs.replace(one, fix=structs.replace(one.fix, digest=None))
    (tmp_path / "x.py").write_text(change(SCRIPT))
    if digest or without_digest:
        refused(result_with(one), tmp_path, "E345")
    else:
        assert patches.changed(result_with(one), tmp_path)


def test_read_only_files_and_folders_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").write_text(SCRIPT)
    result = result_with(finding(tmp_path, "x.py", 4))
    (tmp_path / "x.py").chmod(0o444)
    assert refused(result, tmp_path, "E346").why == "it is read-only"
    assert (tmp_path / "x.py").stat().st_mode & 0o777 == 0o444
    if os.geteuid():
        (tmp_path / "x.py").chmod(0o644)
        tmp_path.chmod(0o555)
        refused(result, tmp_path, "E346")
        tmp_path.chmod(0o755)


def test_nothing_outside_the_folder_is_touched(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    for place in (root / "real.py", root / "words.txt", outside / "x.py"):
        place.write_text(SCRIPT)
    (root / "link.py").symlink_to(root / "real.py")
    (root / "out.py").symlink_to(outside / "x.py")
    (root / "folder").symlink_to(outside)
    (root / "loop.py").symlink_to(root / "loop.py")
    os.mkfifo(root / "pipe.py")
    (root / "dir.py").mkdir()
    there = everything_in(tmp_path)
    for name in (
        *("../outside/x.py", "sub/../../outside/x.py", f"{outside}/x.py", "link.py", "out.py"),
        *("folder/x.py", "loop.py", "pipe.py", "dir.py", "absent.py", ".", "..", "/", "/dev/null"),
        *("a" * 5000, "real.py/x", f"{root}/../outside/x.py", "words.txt"),
    ):
        result = result_with(finding(root, "real.py", 4, shown=name))
        refused(result, root, "E344")
        assert patches.patch(result, root) is not None
    assert everything_in(tmp_path) == there


def test_a_whole_path_below_the_folder_will_do(inside: Path) -> None:
    """As of a script that was recorded from elsewhere; the folder itself may be a link."""
    (inside / "real").mkdir()
    (inside / "link").symlink_to("real")
    (inside / "real" / "x.py").write_text(SCRIPT)
    for named in (inside / "real", inside / "link"):
        one = finding(inside / "real", "x.py", 4, shown=str(named / "x.py"))
        folder = written(inside / "out", result_with(one))
        words = ["fix", str(folder), "--root", str(named)]
        assert main([*words, "--apply", "--yes"]) == 0
        assert (inside / "real" / "x.py").read_bytes() == GONE
        assert main([*words, "--revert"]) == 0
        assert (inside / "real" / "x.py").read_text() == SCRIPT


HEAD = "--- a/x.py\n+++ b/x.py\n"


@pytest.mark.parametrize(
    "diff",
    [
        "x",
        HEAD,
        f"{HEAD}@@ -1,1 +1,1 @@\n-import torch\n",
        f"{HEAD}@@ -1,1 +1,1 @@\n-import torch\n+import os\n",
        f"{HEAD}@@ -1,1 +1,2 @@\n import torch\n+import torch\n",
        f"{HEAD}@@ -1,0 +1,1 @@\n+pass\n",
        f"{HEAD}@@ -0,0 +1,1 @@\n+pass\n",
        f"{HEAD}@@ -1,1 +0,0 @@\n-import torch\n@@ nonsense\n",
        f"{HEAD}@@ -99999999,1 +0,0 @@\n-import torch\n",
        f"{HEAD}@@ -1,1 +0,0 @@\n-import torch\nrest\n",
        "--- a/x.py\n+++ b/y.py\n@@ -1,1 +0,0 @@\n-import torch\n",
        "new file mode 100755\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1 @@\n+x\n",
        f"{HEAD}@@ -1,1 +1,1 @@\n-import torch\n+eval(input())\n",
        f"{HEAD}@@ -1,1 +1,1 @@\n-import torch\n+import torch; torch\n",
        f"{HEAD}@@ -1,1 +1,1 @@\n-import torch\n+import(torch\n",
        f"{HEAD}@@ -1,2 +1,1 @@\n-import torch\n \n" + "x" * 200_000 + "\n",
    ],
)
def test_diffs_that_we_do_not_write_are_refused(tmp_path: Path, diff: str) -> None:
    (tmp_path / "x.py").write_text(SCRIPT)
    for digest in (None, sha256(SCRIPT.encode()).hexdigest()):
        there = everything_in(tmp_path)
        with pytest.raises(InputError):
            patches.changed(with_diff(diff, digest), tmp_path)
        assert everything_in(tmp_path) == there


@given(st.text(alphabet='-+@ ,0123ab/\n\t"\\x.py\r\x00é', max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_diff_whatsoever_breaks_anything(text: str) -> None:
    for diff in (f"x{text}", HEAD + text, f"{HEAD}@@ -1,1 +1,1 @@\n{text}\n"):
        with pytest.raises(InputError):
            patches.changed(with_diff(diff), Path("/nonexistent"))
        assert isinstance(patches.patch(with_diff(diff), Path("/nonexistent")), (bytes, type(None)))


def test_what_was_written_again_is_not_put_back(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = inside / "x.py"
    script.write_text(SCRIPT)
    folder = written(inside / "out", result_with(finding(inside, "x.py", 4)))
    assert main(["fix", "out", "--apply", "--yes"]) == 0
    script.write_bytes(GONE + b"more()\n")
    assert main(["fix", "out", "--revert"]) == 3
    assert script.read_bytes() == GONE + b"more()\n"
    said = capsys.readouterr().err
    assert "[E345]" in said
    assert SCRIPT.encode() in [one.read_bytes() for one in folder.iterdir()]


def test_a_record_from_elsewhere_puts_nothing_back(tmp_path: Path) -> None:
    """Somebody who knows the file, and what it would be with the fix, knows not when it was
    written.
    """
    script, folder = tmp_path / "x.py", tmp_path / "out"
    folder.mkdir()
    script.write_bytes(GONE)
    evil = b"import os\n"
    (folder / "copy").write_bytes(evil)
    record = {
        "file": "x.py",
        "copy": "copy",
        "before": sha256(evil).hexdigest(),
        "after": sha256(GONE).hexdigest(),
        "moment": 0,
    }
    for change in ({}, {"file": "../x.py"}, {"copy": "../x.py"}, {"copy": "/etc/passwd"}):
        (folder / "fix-applied.json").write_text(json.dumps([[{**record, **change}]]))
        with pytest.raises(InputError):
            patches.revert(folder, tmp_path)
        assert script.read_bytes() == GONE
    (folder / "fix-applied.json").write_text("[[" * 1000)
    with pytest.raises(InputError):
        patches.revert(folder, tmp_path)


def test_links_in_the_folder_of_the_result_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(SCRIPT)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("fix-applied.json", "before-fix-1-1-x.py", "fix-applied.part"):
        (folder / name).symlink_to(victim)
    patches.apply(patches.changed(result_with(finding(tmp_path, "x.py", 4)), tmp_path), folder)
    assert victim.read_text() == "mine"
    assert (tmp_path / "x.py").read_bytes() == GONE
    assert patches.revert(folder, tmp_path) == ["x.py"]
    assert (tmp_path / "x.py").read_text() == SCRIPT


def test_a_second_fix_is_taken_back_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TWO)
    folder = tmp_path / "out"
    folder.mkdir()
    for line, left in ((5, "b = 2\n"), (2, "other.enable()\nb = 2\n")):
        patches.apply(
            patches.changed(result_with(finding(tmp_path, "x.py", line)), tmp_path), folder
        )
        assert (tmp_path / "x.py").read_text().endswith(left)
    patches.revert(folder, tmp_path)
    with pytest.raises(InputError, match="was changed after"):
        patches.revert(folder, tmp_path)  # it was: the first fix's own moment is gone


def test_a_fix_that_wants_a_look_is_not_applied_unseen(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "x.py").write_text(SCRIPT)
    one = finding(inside, "x.py", 4)
    for disposition, reason, status in (("review", "It takes 3 GiB.", 2), ("safe", None, 0)):
        fix = structs.replace(present(one.fix), disposition=disposition, reason=reason)
        written(inside / "out", result_with(structs.replace(one, fix=fix)))
        assert main(["fix", "out", "--apply"]) == status
        assert ((inside / "x.py").read_text() == SCRIPT) == bool(status)
        said = capsys.readouterr().err
        assert ("It takes 3 GiB." in said and "[E241]" in said) == bool(status)


def test_a_script_of_a_result_is_not_run_unasked(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inside / "train.py").write_text("open('ran', 'w')\n")
    two = {"target": "train.py", "world_size": "2", "local_world_size": "2"}
    written(inside / "out", structs.replace(doubled(), environment=two))
    assert main(["fix", "out", "--verify"]) == 2
    assert "run --verify -o out --nproc-per-node 2 train.py" in capsys.readouterr().err
    elsewhere = {**two, "world_size": "4"}  # two of its four ranks were on another machine
    written(inside / "out", structs.replace(doubled(), environment=elsewhere))
    assert main(["fix", "out", "--verify"]) == 2
    assert "run --verify -o out train.py" in capsys.readouterr().err
    written(inside / "out", structs.replace(doubled(), environment={"target": "rm -rf; x.py"}))
    assert main(["fix", "out", "--verify", "--yes"]) == 3
    assert "[E349]" in capsys.readouterr().err
    assert not (inside / "ran").exists()


def test_what_is_shown_is_harmless(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;x\x07\u202e::error::"
    diff = f"--- a/{evil}\n+++ b/{evil}\n@@ -1,1 +0,0 @@\n-{evil}\n"
    result = with_diff(diff)
    (one,) = result.findings
    assert one.fix is not None
    texts = dict.fromkeys(("summary", "keep", "remove", "reason"), evil)
    one = structs.replace(one, title=evil, fix=structs.replace(one.fix, **texts))
    written(inside / "out", structs.replace(result, findings=(one,)))
    for words in ([], ["--apply"], ["--apply", "--yes"], ["--revert"]):
        main(["fix", "out", *words])
        shown = "".join(capsys.readouterr())
        assert not set(shown) & {"\x1b", "\x07", "\u202e"}
        assert "\n::error" not in shown


def test_without_a_diff_it_is_said_what_to_do(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = doubled().findings
    assert one.fix is not None
    advice = Fix("Do this.", "review", None, "", "", "", reason="No line was found.")
    for findings, said in (((), "nothing was found"), ((structs.replace(one, fix=advice),), "Do")):
        written(inside / "out", result_with(*findings))
        for words in ([], ["--apply", "--yes"]):
            assert main(["fix", "out", *words]) == 3
            error = capsys.readouterr().err
            assert "[E348]" in error
            assert said in error


def test_lines_of_a_statement_that_stay_are_not_in_its_diff(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("model.enable(\n    rng=False,\n    more=1,\n)\nx = 1\n")
    edit = Edit("*", "keyword", "rng", "True")
    diff = present(present(finding(tmp_path, "a.py", 1, (edit,)).fix).diff)
    changed = [line for line in diff.splitlines()[2:] if line[0] in "+-"]
    assert changed == ["-    rng=False,", "+    rng=True,"]
