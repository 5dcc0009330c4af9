"""``python -m recompute_scan``."""

import os
import sys

# `python -m` looks for modules in the folder where it is started first, which may be a stranger's.
# The first place is kept: `run` puts the script's own folder there.
if sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):  # noqa: PTH109 - text
    sys.path[0] = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - links stay

from recompute_scan.cli import main

if __name__ == "__main__":
    sys.exit(main())
