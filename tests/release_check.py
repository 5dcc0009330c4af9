"""What a release holds, and whether it works where nothing else is: ``make release-check``.

Builds sdist and wheel, looks into both, installs the wheel alone into a new environment, runs
there what needs no torch, then the README's commands with this environment's torch beside it.
``--licenses`` lists what that installation brought instead.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WHEEL = re.compile(
    r"recompute_scan/[\w/]+\.py|recompute_scan/py\.typed"
    r"|recompute_scan/report/(templates|sections)/[\w.]+\.(html|css|js)"
    r"|recompute_scan/bundle/(operators|vendor_words)\.txt"
    r"|recompute_scan/docs/(findings/(RS\d{3}|index)|messages)\.md"
    # One line that lets processes below a launcher take part, and does nothing else.
    r"|recompute_scan\.pth"
    r"|recompute_scan-[\w.]+\.dist-info/"
    r"(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)"
)
_SDIST = re.compile(
    r"(src|tests|examples|docs|traces|notebooks|benchmarks)/.*|PKG-INFO|pyproject\.toml|\.gitignore"
    r"|README\.md|LICENSE|CHANGELOG\.md|Makefile|action\.yml|constraints\.txt"
)
TRACE = ROOT / "traces" / "doubled_llama_fsdp"


def main() -> int:
    """Ends with an exception where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--licenses", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = build(folder / "dist")
        python = install(wheel, folder / "alone")
        if options.licenses:
            run(sys.executable, "-m", "piplicenses", f"--python={python}", "--format=markdown")
            return 0
        look_into(wheel, sdist)
        use_without_torch(python, folder)
        run_the_readme(python)
    print("the release is whole, installs alone and does what the README says")
    return 0


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist. The wheel is built from the sdist, as an installer would."""
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        quiet=True,
    )
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def look_into(wheel: Path, sdist: Path) -> None:
    """Nothing that does not belong there."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        odd = [name for name in names if not _WHEEL.fullmatch(name)]
        assert not odd, f"in the wheel: {odd}"
        points = next(n for n in names if n.endswith("entry_points.txt"))
        text = opened.read(points).decode()
        assert "recompute-scan = recompute_scan.__main__:main" in text
        assert "recompute_scan = recompute_scan.pytest_plugin" in text
        home = str(ROOT).encode()
        traced = [name for name in names if home in opened.read(name)]
        assert not traced, f"names this machine: {traced}"
        for name in names:
            path = ROOT / ("src/" + name).replace("src/recompute_scan/docs/", "docs/")
            if ".dist-info/" not in name:
                assert opened.read(name) == path.read_bytes(), f"{name} is not the repository's"
    size = wheel.stat().st_size
    with tarfile.open(sdist) as archive:
        inside = [member.name.partition("/")[2] for member in archive if member.isfile()]
        odd = [name for name in inside if not _SDIST.fullmatch(name)]
        assert not odd, f"in the sdist: {odd}"
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    print(f"{wheel.name}: {len(names)} files, {size:,} bytes; {sdist.name}: {len(inside)} files")


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment that holds the wheel and what it asks for."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    wanted = ("--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    # It takes what it fetched for the environment of the tests, and a thirtieth of pip's time.
    uv = (sys.executable, "-m", "uv", "pip", "install", f"--python={python}", *wanted)
    if subprocess.run(uv, timeout=900).returncode:  # pip may know a way to the index
        run(sys.executable, "-m", "pip", f"--python={python}", "install", *wanted)
    return python


def use_without_torch(python: Path, folder: Path) -> None:
    """Every command that needs no torch, where there is none."""
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr, "torch came along"
    tool = str(python.parent / "recompute-scan")
    here = folder
    run(tool, "analyze", str(TRACE), "--html", "page.html", "--output", "out.txt", cwd=here)
    run(tool, "bundle", str(TRACE), "-o", "share.zip", quiet=True, cwd=here)
    run(tool, "analyze", "share.zip", "--format", "json", "--output", "result.json", cwd=here)
    run(tool, "report", "result.json", quiet=True, cwd=here)
    refused = subprocess.run([tool, "check", "result.json"], cwd=folder, capture_output=True)
    assert refused.returncode == 1
    missing = subprocess.run([tool, "run", "train.py"], cwd=folder, capture_output=True, text=True)
    assert missing.returncode == 2, missing.stderr
    assert "[E201]" in missing.stderr


def run_the_readme(python: Path) -> None:
    """The README's commands with the installed wheel, and this environment's torch beside it."""
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # Behind the new environment's own packages, and without the .pth files in there, by which
    # the working tree would come first.
    paths = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))]
    (Path(site) / "torch-beside.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    launcher = python.parent / "torchrun"
    launcher.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    launcher.chmod(0o755)
    where = subprocess.run(
        [python, "-c", "import recompute_scan, torch; print(recompute_scan.__file__)"],
        capture_output=True, text=True, check=True, cwd="/",
    ).stdout.strip()  # fmt: skip
    assert where.startswith(site), f"the README would run {where}"
    run(
        sys.executable, "-m", "pytest", "--quiet", "tests/test_readme.py", "-k", "test_command",
        cwd=ROOT, env={**os.environ, "RECOMPUTE_SCAN_PYTHON": str(python)},
    )  # fmt: skip


def run(
    *command: str, quiet: bool = False, cwd: Path | None = None, env: dict[str, str] | None = None
) -> None:
    output = subprocess.DEVNULL if quiet else None
    subprocess.run(command, check=True, stdout=output, cwd=cwd, env=env, timeout=900)


if __name__ == "__main__":
    sys.exit(main())
