"""``python -m pipesim``, where the command is not installed."""

import sys

from pipesim.cli import main

if __name__ == "__main__":
    sys.exit(main())
