"""`python -m quire` is the `quire` command."""

from quire.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
