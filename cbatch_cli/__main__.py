"""`python -m cbatch_cli`."""

import sys

from cbatch_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
