"""When a checkpoint exists: attempts, claim, commit, removal.

What most callers need is here: `from dist_ckpt import commit`, then `commit.claim(...)`. `order.py`
is the order that a crash may break anywhere, `attempts.py` reads and puts `index.json`, the one
file that decides, `removal.py` says how attempts go, `verdicts.py` what became of one after an
error.
"""

from dist_ckpt.commit.attempts import Status, abandon, find, statuses
from dist_ckpt.commit.order import Claim, await_claim, check_files, claim, commit, give_up
from dist_ckpt.commit.removal import (
    check_deletable,
    collect,
    collect_all,
    delete,
    remove,
    supersede,
)
from dist_ckpt.commit.verdicts import settle, unsettled

__all__ = [
    "Claim",
    "Status",
    "abandon",
    "await_claim",
    "check_deletable",
    "check_files",
    "claim",
    "collect",
    "collect_all",
    "commit",
    "delete",
    "find",
    "give_up",
    "remove",
    "settle",
    "statuses",
    "supersede",
    "unsettled",
]
