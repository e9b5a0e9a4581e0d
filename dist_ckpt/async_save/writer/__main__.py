"""`python -m dist_ckpt.async_save.writer FD` is a rank's background writer."""

from __future__ import annotations

import sys

from dist_ckpt.async_save.writer.background_writer import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
