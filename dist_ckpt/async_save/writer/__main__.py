"""`python -m dist_ckpt.async_save.writer FD` is a rank's background writer."""

from __future__ import annotations

import gc
import sys

# Importing makes no garbage, and the collector would look at every module several times.
gc.disable()
from dist_ckpt.async_save.writer.background_writer import main  # noqa: E402

gc.enable()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
