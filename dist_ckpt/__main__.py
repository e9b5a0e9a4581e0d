"""The command line, as `python -m dist_ckpt` or `dist-ckpt`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from dist_ckpt.cli import main as run  # noqa: PLC0415  (slow: may be interrupted)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
