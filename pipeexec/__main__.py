"""``python -m pipeexec``, as torchrun needs it."""

import sys

from pipeexec.cli import main

if __name__ == "__main__":
    sys.exit(main())
