"""The five reported failures, in several forms and with the versions they came with.

A version of a library that isn't installed is put into a folder for the time of the run, without
what it depends on.
"""

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.diagnose.cases import HUNG, Case

# What each version is made of.
LIBRARIES = {
    "transformers 4.40": ("transformers==4.40.2", "tokenizers==0.19.1", "huggingface_hub==0.23.5"),
    "transformers 4.45": ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.25.2"),
    "lightning 2.2.1": ("lightning==2.2.1", "setuptools<80"),
}


@dataclass(frozen=True)
class Failure:
    """One row.

    Attributes:
        reported: What was reported.
        case: The script, and the code that is right.
        library: A version that it runs with, or a library whose installed version it runs with.
    """

    reported: str
    case: Case
    library: str = ""


CACHE = "the key-value cache grows in the recompute"
WEIGHTS = "Lightning saves weights only, sharded"
STATE = "FSDP gathers an optimizer's state"
FLAT = "a weight of FSDP is flat"
SAVE = "one rank saves, and the job hangs"

FAILURES = (
    Failure(CACHE, Case("kv_cache", "RS101")),
    Failure(CACHE, Case("forms/cache_by_hand", "RS101", ranks=2)),
    *(
        Failure(CACHE, case, library)
        for library in ("transformers 4.40", "transformers 4.45", "transformers")
        for case in (
            Case("forms/cache_llama", "RS110"),
            Case("forms/cache_sharded", "RS110", ranks=2),
        )
    ),
    *(
        Failure(WEIGHTS, Case(script, code, ranks=2, status=int(bool(code))), library)
        # The installed version has no such fault: it gets no finding, either way.
        for library, code in (("lightning 2.2.1", "RS201"), ("lightning", ""))
        for script in (
            "weights_only_save",
            "forms/weights_only_units",
            "forms/weights_only_subclass",
        )
    ),
    Failure(STATE, Case("optimizer_dtype", "RS202", ranks=2)),
    Failure(STATE, Case("forms/state_of_one_rank", "RS202", ranks=2)),
    Failure(STATE, Case("forms/state_of_units", "RS202", ranks=2)),
    Failure(FLAT, Case("fsdp_weight", "RS117", ranks=2)),
    Failure(FLAT, Case("forms/weight_by_method", "RS117", ranks=2)),
    Failure(FLAT, Case("forms/weight_of_reference", "RS117", ranks=2)),
    Failure(SAVE, Case("save_hang", "RS204", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_distributed", "RS204", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_and_train", "RS210", ranks=2, status=HUNG, hangs=True)),
    Failure(SAVE, Case("forms/save_no_barrier", "RS210", ranks=2, status=HUNG, hangs=True)),
)


def named(library: str) -> str:
    """The library with its version, as in the table."""
    if library in LIBRARIES:
        return LIBRARIES[library][0].replace("==", " ")
    return f"{library} {importlib.metadata.version(library)}" if library else "torch alone"


def libraries(library: str, folder: Path) -> Path | None:
    """The folder that holds this version, made if it isn't there."""
    if library not in LIBRARIES:
        return None
    path = folder / library.replace(" ", "-")
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(path)]
        subprocess.run([*pip, *LIBRARIES[library]], check=True, capture_output=True)
    return path
