"""`quire` and `python -m quire`: the command, with Ctrl-C taken care of before anything else is imported."""

from quire.interrupt import install

install()

from quire.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
