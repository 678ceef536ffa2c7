"""Entry point of ``python -m pipeexec`` and ``torchrun -m pipeexec``."""

import sys

from pipeexec.cli import main

if __name__ == "__main__":
    sys.exit(main())
