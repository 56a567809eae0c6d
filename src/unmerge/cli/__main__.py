"""`python -m unmerge.cli`: the command without its installed script."""

import sys

from unmerge.cli import main

if __name__ == "__main__":
    sys.exit(main())
