"""`quire` and `python -m quire`. Installs the Ctrl-C handler before it imports anything else."""

from quire.interrupt import install

install()

from quire.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
