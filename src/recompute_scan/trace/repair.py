"""Text that some profilers write and no JSON parser takes, made readable.

Kineto copies names into its file byte by byte: a name can bring invalid UTF-8
(pytorch/pytorch#64345) or control characters (pytorch/pytorch#136180) with it, and programs
that write a trace anew leave halves of surrogate pairs.
"""

from __future__ import annotations

import re

# A JSON string may hold none of these, and between values a space means the same.
_CONTROLS = bytes.maketrans(bytes(range(0x20)), b" " * 0x20)
# A valid pair, half of one, or any other escape: reading them in turn keeps `\\ud800` (an
# escaped backslash and plain text) apart from `\ud800`.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\.",
    re.DOTALL,
)


def mend_text(data: bytes) -> bytes:
    """The document in valid UTF-8, without raw control characters or halves of surrogate pairs.

    Bytes that are no UTF-8 and halves of pairs become U+FFFD, control characters spaces. Sound
    text stays as it is.
    """
    data = data.decode(errors="replace").encode().translate(_CONTROLS)
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], data)
