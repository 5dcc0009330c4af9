"""Brings what ranks recorded on other file systems into rank 0's folder.

It travels through the store of the script's process group once the script has ended, in pieces,
so that it needs no port, no address and no login of its own.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from recompute_scan.files import make_new, write_whole
from recompute_scan.record.compat import holds
from recompute_scan.run_info import WORD, RunInfo, compiled_name, encode_run_info, run_info_name

# Torch's stores take values of up to 8 MiB.
_PIECE = 1 << 20
# A store is not made for bulk: larger traces stay where they are.
MOST_BYTES = 64 << 20
_TIMEOUT_S = 60.0
_POLL_S = 0.1
# What the store raises when the rank or agent that held it has gone.
_GONE = (RuntimeError, ValueError)


def mark_folder(folder: Path, store: Any, rank: int) -> None:
    """Rank 0 leaves a word in its folder and in the store: who finds both shares the folder."""
    if rank == 0 and store is not None:
        word = uuid.uuid4().hex
        with suppress(OSError, *_GONE):
            write_whole(folder / WORD, word.encode())
            store.set("word", word)


def send(folder: Path, store: Any, info: RunInfo) -> None:
    """What a rank other than 0 does at its end: send its files where rank 0 cannot see them.

    Args:
        folder: This rank's folder.
        store: The store of the process group, as it was during the run.
        info: This rank's run record.
    """
    key = f"rank{info.rank}"
    with suppress(OSError, *_GONE):
        if _shares(folder, store):
            store.set(key, json.dumps({"files": [], "left": None}))
            return
        names = [name for name in (info.trace, info.stacks) if name is not None]
        if (folder / compiled_name(info.rank)).is_file():
            names.append(compiled_name(info.rank))
        size = sum((folder / name).stat().st_size for name in names)
        left = None
        if size > MOST_BYTES:
            left, names = f"{socket.gethostname()}:{folder}", []
        files = {name: (folder / name).read_bytes() for name in names}
        files[run_info_name(info.rank)] = encode_run_info(info)  # last: with it all is there
        sent = []
        for name, data in files.items():
            pieces = range(0, len(data), _PIECE)
            for number, at in enumerate(pieces):
                store.set(f"{key}/{name}/{number}", data[at : at + _PIECE])
            sent.append([name, len(pieces)])
        store.set(key, json.dumps({"files": sent, "left": left}))


def receive(folder: Path, store: Any, world_size: int) -> tuple[str, ...]:
    """What rank 0 does at its end: take what the others sent into its folder.

    Waits for each rank's word, or its run record in this folder, for a minute at most.

    Returns:
        A sentence for each rank whose traces were too large to send.
    """
    said = []
    waited = set(range(1, world_size))
    deadline = time.monotonic() + _TIMEOUT_S
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        while waited and time.monotonic() < deadline:
            for rank in sorted(waited):
                if (folder / run_info_name(rank)).exists():
                    waited.discard(rank)
                elif holds(store, f"rank{rank}"):
                    waited.discard(rank)
                    left = _take(folder, store, rank)
                    if left is not None:
                        said.append(
                            f"The traces of rank {rank} lie in {left}: copy them into {folder} "
                            "and run `recompute-scan analyze` on it."
                        )
            if waited:
                time.sleep(_POLL_S)
    return tuple(said)


def _shares(folder: Path, store: Any) -> bool:
    # Without a word from rank 0 nobody collects: as good as shared.
    if not holds(store, "word"):
        return True
    try:
        return bool((folder / WORD).read_text() == store.get("word").decode())
    except FileNotFoundError:
        return False


def _take(folder: Path, store: Any, rank: int) -> str | None:
    about = json.loads(store.get(f"rank{rank}"))
    traces = f"trace-rank{rank}.json.gz", f"stacks-rank{rank}.json.gz"
    expected = (*traces, compiled_name(rank), run_info_name(rank))
    for name, pieces in about["files"]:
        if name not in expected:  # it came over the network
            continue
        partial = folder / f".{name}.part"
        make_new(partial)
        with partial.open("wb") as file:
            for number in range(pieces):
                key = f"rank{rank}/{name}/{number}"
                file.write(store.get(key))
                store.delete_key(key)
        partial.replace(folder / name)
    left = about["left"]
    return None if left is None else str(left)
