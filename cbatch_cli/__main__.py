"""`python -m cbatch_cli`."""

from cbatch_cli.cli import main

main()
