"""What is said of the Nsight Systems exports that others have published.

The files stay where they were published; most of them come without a license. FOLDER holds them,
under any names: a hash tells each. A file of the folder that is not listed gets a row too.

  python -m benchmarks nsys-exports FOLDER

The status is 1 where a listed one is missing.
"""

import hashlib
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import click

from benchmarks._frame import Table, benchmark
from recompute_scan.analysis.pipeline import analyse
from recompute_scan.errors import InputError

# First 12 digits of the SHA-256; repository and path on GitHub.
SOURCES = dict(
    line.split(maxsplit=1)
    for line in """
36ad440e71a3 GindaChen/nsys-ai tests/fixtures/h100_2gpu_1s.sqlite
6ee860b22843 GindaChen/nsys-ai tests/fixtures/mfu_2gpu_before.sqlite
5842c1f39369 GindaChen/nsys-ai tests/fixtures/mfu_2gpu_after.sqlite
84c90236cd88 GindaChen/nsys-ai tests/fixtures/mock.sqlite
3ef2eff9b587 GindaChen/nsys-ai tests/fixtures/healthy_1pct.sqlite
d69330eb3520 GindaChen/nsys-ai tests/fixtures/healthy_judged_1pct.sqlite
f2fb77d3af85 frasertajima/WeatherBench2 report1.sqlite
1714a78bdc3a MohanadOdema/DLProf nsys_profile.sqlite
9761786ccb53 MohanadOdema/DLProf w_Relu/nsys_profile.sqlite
657924bfb8e8 MohanadOdema/DLProf dlprof_dldb.sqlite
f7d47852d772 amir-ghz/DynamicViT nsys_profile.sqlite
337930304c2f CO18326/uvmTorch report1.sqlite
2ba601e531ad PolPuigPuy/OpenACC_Project_PolPuig report12.sqlite
e2c9cc63b5b7 kmcho2019/Rodinia_3.1_Gaussian report5.sqlite
dea1d66496ba lsaeteurn/vectoraddition report4.sqlite
4d811273361a lighttransport/gemm profile.sqlite
ba4efa13cc99 ynan1/aws_gpu nsys_profiling/report2.sqlite
""".strip().splitlines()
)
_HELD = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernels",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "CUDA calls",
    "NVTX_EVENTS": "NVTX events",
    "OSRT_API": "system calls",
}


@benchmark
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(folder: Path) -> int:
    files = sorted(folder.glob("*.sqlite"))
    found = {hashlib.sha256(path.read_bytes()).hexdigest()[:12]: path for path in files}
    heads = ("published in", "file", "nsys, schema", "what it holds", "answer")
    table = Table(dict.fromkeys(heads, "<"), markdown=True)
    for digest in (*SOURCES, *(each for each in found if each not in SOURCES)):
        if digest in found:
            repository, _, file = SOURCES.get(digest, f" {found[digest].name}").partition(" ")
            table.row(repository, f"`{file}`", *_look(found[digest]), _said(found[digest]))
    missing = [source for digest, source in SOURCES.items() if digest not in found]
    for source in missing:
        print(f"not in the folder: {source}", file=sys.stderr)
    return int(bool(missing))


def _look(path: Path) -> tuple[str, str]:
    """The versions that the file gives, and its rows, counted without the tool's reader."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as file:
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
        about: dict[str, str] = {}
        for table in tables & {"META_DATA_EXPORT", "EXPORT_META_DATA"}:
            about |= dict(file.execute(f'SELECT name, value FROM "{table}"').fetchall())
        counts = [
            (file.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0], what)
            for table, what in _HELD.items()
            if table in tables
        ]
    version = about.get("EXPORT_PRODUCT_VERSION")
    nsys = f"{version}, {about['EXPORT_SCHEMA_VERSION']}" if version else "not given"
    return nsys, ", ".join(f"{n:,} {what}" for n, what in counts if n) or "none of these"


def _said(path: Path) -> str:
    try:
        result = analyse([path])
    except InputError as error:
        what = error.what.replace(f"{path} is", "it is").rstrip(".")
        return f"{error.code}: {what}; {error.why}"
    return f"`{result.verdict}`: {result.reason}" if result.reason else f"`{result.verdict}`"
