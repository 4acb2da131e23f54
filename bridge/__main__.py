"""`python -m bridge` is the command `bridge`."""

from bridge_cli.main import main

main()
