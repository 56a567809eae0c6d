"""`python -m unmerge`: the command, also as torchrun starts it."""

import sys

from unmerge.cli import main

if __name__ == "__main__":
    sys.exit(main())
