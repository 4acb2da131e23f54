"""`python -m bridge` is the command `bridge`."""

from cli.main import main

main()
