"""A recording written to a file."""

import gzip
import shutil
from pathlib import Path

from torch.profiler import profile


def export(profiler: profile, trace: Path) -> None:
    """Write a recording, gzipped if the name ends in ``.gz``.

    torch packs line by line in Python, which takes ten times as long as all that a small model
    does.
    """
    if trace.suffix != ".gz":
        profiler.export_chrome_trace(str(trace))
        return
    plain = trace.with_suffix("")
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(trace, "wb", compresslevel=3) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
    finally:
        plain.unlink(missing_ok=True)
