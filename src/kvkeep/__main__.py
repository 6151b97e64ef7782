"""`python -m kvkeep` is the `kvkeep` command."""

import sys

from kvkeep.cli import main

if __name__ == "__main__":
    sys.exit(main())
