"""`python -m bochner`, and the entry point of the command `bochner`."""

import sys

from bochner._checks import MissingExtraError


def main() -> None:
    """Run the command line; without the extra it needs, say so in one line."""
    try:
        from bochner.cli import main as run
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    run()


if __name__ == "__main__":
    main()
