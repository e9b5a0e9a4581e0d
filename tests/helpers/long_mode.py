"""What repeats is repeated more often by hand: `DIST_CKPT_LONG_TESTS=1 scripts/test.sh`."""

from __future__ import annotations

import os

IS_LONG = bool(os.environ.get("DIST_CKPT_LONG_TESTS"))
