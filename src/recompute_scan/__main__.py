"""``python -m recompute_scan``."""

import sys

from recompute_scan.cli import main

if __name__ == "__main__":
    sys.exit(main())
