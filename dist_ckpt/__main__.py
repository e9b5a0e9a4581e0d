"""`python -m dist_ckpt` is the command line."""

from __future__ import annotations

from dist_ckpt.cli import main

if __name__ == "__main__":
    main()
