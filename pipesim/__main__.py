"""``python -m pipesim``: the command, where it is not installed."""

import sys

from pipesim.cli import main

if __name__ == "__main__":
    sys.exit(main())
