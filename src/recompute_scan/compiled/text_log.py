"""The compiler's graphs in what a program prints under ``TORCH_LOGS=aot_graphs``.

Every line begins with glog's prefix, the compilation and the log's name. A graph is the lines from
its heading to the next one. Which code was compiled, and on which stack, is not there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from recompute_scan.compiled.structured import Record

MARK = "[__aot_graphs]"
# Rank where there are several, process, compilation, text. The attempt is behind an underscore.
_LINE = re.compile(
    r"(?:\[rank(\d{1,6})\]:)?[A-Z]\d{4} [\d:.]{8,20} (\d{1,10}) [^\]]{0,400}\] "
    r"\[(\d{1,9})/(\d{1,9})(?:_\d{1,9})?\] \[__aot_graphs\] ?(.*)$",
    re.ASCII,
)
_HEADING = re.compile(r"\s*===== (Forward|Backward) graph \d+ =====")
_END = "TRACED GRAPH"


def read_text_log(lines: Iterable[str]) -> dict[int, list[Record]]:
    """The records of each rank, or of each process in order where no ranks are told.

    Lines of anything else are passed over.
    """
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    open_: dict[tuple[str, str], tuple[Record, list[str]]] = {}

    def close(whose: tuple[str, str]) -> None:
        if whose in open_:
            record, body = open_.pop(whose)
            found[whose].append(Record(record.name, record.fields, "\n".join(body)))

    for line in lines:
        match = _LINE.search(line) if MARK in line else None
        if match is None:
            continue
        rank, process, frame, version, said = match.groups()
        # Ranks that are told are one process each.
        whose = (rank or "", "" if rank else process)
        heading = _HEADING.match(said)
        if heading or said.startswith(_END):
            close(whose)
        if heading:
            name = "aot_forward_graph" if heading[1] == "Forward" else "aot_backward_graph"
            where = {"frame_id": int(frame), "frame_compile_id": int(version)}
            open_[whose] = Record(name, {name: {}, **where}, ""), []
        elif whose in open_:
            open_[whose][1].append(said)
    for whose in list(open_):
        close(whose)
    ranks: dict[int, list[Record]] = {}
    for (rank, _), records in found.items():
        ranks[int(rank) if rank else len(ranks)] = records
    return ranks
