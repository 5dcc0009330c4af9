"""Records a script as the command line would: ``python driver.py OPTIONS_JSON``."""

import json
import sys
from pathlib import Path

from recompute_scan.errors import ScanError
from recompute_scan.record.children import record
from recompute_scan.record.options import RunOptions


def main() -> int:
    options = json.loads(sys.argv[1])
    options["args"] = tuple(options["args"])
    options["output"] = Path(options["output"])
    try:
        return record(RunOptions(**options)).exit_status
    except ScanError as error:
        print(error, file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
