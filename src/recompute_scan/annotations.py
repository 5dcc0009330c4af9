"""The annotations that a recorded run leaves in its trace, written and read in one place.

A checkpointed call is one range in the forward pass, and one more for each recompute::

    recompute_scan.region?call=17&depth=1&variant=reentrant&module=layers.3&…
    recompute_scan.recompute?call=17

``call`` numbers the calls of one process and ties a recompute to the call it repeats. Values are
URL-encoded, so a name can hold no quote, backslash or control character, which some versions
of Kineto write into the JSON unescaped (pytorch/kineto#1459).
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

from msgspec import Struct
from msgspec.structs import asdict

REGION = "recompute_scan.region?"
RECOMPUTE = "recompute_scan.recompute?"
# Recordings made before 0.1.0 say "replay".
ANY_RECOMPUTE = re.compile(r"recompute_scan\.re(?:compute|play)\?")
# Around the time that naming a checkpointed call takes the run wrapper itself.
ANNOTATING = "recompute_scan.annotating"
LONGEST_NAME = 4096

# A recorded run notes these of a checkpoint call, besides its variant.
EARLY_STOP_OFF = "early-stop-off"
SELECTIVE = "selective"
CHECK_OFF = "determinism-check-off"
RANDOM_STATE_LEFT = "random-state-not-kept"
COUNTS_RUNS = "counts-runs"
# Of a checkpoint inside compiled code, and of a function that goes through its block part by part:
# no annotation has these, but the graph or the trace shows them.
COMPILED = "compiled"
IN_PARTS = "in-parts"
OPTIONS = (EARLY_STOP_OFF, SELECTIVE, CHECK_OFF, RANDOM_STATE_LEFT, COUNTS_RUNS)


class RegionAnnotation(Struct, frozen=True):
    """One checkpointed call. ``depth`` 0 is the outermost; empty text means unknown.

    Attributes:
        call: Number of the call in its process, from 1.
        depth: How many checkpointed calls enclose it.
        variant: ``reentrant`` or ``non-reentrant``.
        module: Name of the wrapped module below the root, wrappers left out.
        module_class: Its class name.
        mechanism: Which API asked for the checkpoint; a name from ``advise``.
        site: ``file:line`` of the user's code that switched it on.
        options: Of :class:`recompute_scan.result.Checkpoint`, with commas between.
        function: Of :class:`recompute_scan.result.Checkpoint`.
    """

    call: int
    depth: int
    variant: str
    module: str = ""
    module_class: str = ""
    mechanism: str = ""
    site: str = ""
    options: str = ""
    function: str = ""


def region_name(annotation: RegionAnnotation) -> str:
    """The range name for a checkpointed call in its first run."""
    return REGION + urlencode(asdict(annotation), errors="surrogateescape")


def recompute_name(call: int) -> str:
    """The range name for one recompute of that call."""
    return f"{RECOMPUTE}call={call}"


def parse_region(name: str) -> RegionAnnotation | None:
    """The annotation in a range name, or ``None`` when it is no well-formed region."""
    fields = _fields(name, REGION)
    if fields is None:
        return None
    call, depth = fields.get("call", ""), fields.get("depth", "")
    if not (_is_small_number(call) and _is_small_number(depth)):
        return None
    texts = {name: fields.get(name, "") for name in RegionAnnotation.__struct_fields__[2:]}
    return RegionAnnotation(int(call), int(depth), **texts)


def parse_recompute(name: str) -> int | None:
    """The call number in a recompute's range name, or ``None`` when it is none."""
    begin = ANY_RECOMPUTE.match(name)
    call = (_fields(name, begin[0]) or {}).get("call", "") if begin else ""
    return int(call) if _is_small_number(call) else None


def _fields(name: str, prefix: str) -> dict[str, str] | None:
    if not name.startswith(prefix) or len(name) > LONGEST_NAME:
        return None
    fields = name[len(prefix) :]
    return dict(
        parse_qsl(fields, keep_blank_values=True, max_num_fields=16, errors="surrogateescape")
    )


def _is_small_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
