"""What model checks of commits have in common: fixed ids, and which calls nobody else can see."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dist_ckpt.core.commit import attempts, commit_protocol, removal
from dist_ckpt.core.commit.records import incarnations, leases, protection_protocol, record_store
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.index import index_json
from dist_ckpt.core.storage import Storage
from model import Call, Replay


def prefix_of(name: str) -> str:
    """Return how the ids begin that a program of this name makes: it is of the last letter."""
    return f"{ord(name[-1]):02x}"


class FixedIds:
    """Ids that are the same whenever a program is run again from its start."""

    def __init__(self) -> None:
        self._name = ""
        self._count = 0

    def begin(self, name: str, number: int) -> None:
        """Begin with those of a program's function."""
        self._name, self._count = name, 1000 * number

    def new(self) -> str:
        """Return the next one."""
        self._count += 1
        return f"{prefix_of(self._name)}{self._count:014x}"


def make_deterministic(patch: pytest.MonkeyPatch) -> FixedIds:
    """Make the library deterministic, faster, and tell where a claim forgets what came before."""
    made = FixedIds()
    for module in (
        attempts,
        leases,
        protection_protocol,
        commit_protocol,
        removal,
        record_store,
        incarnations,
    ):
        if hasattr(module, "new_id"):
            patch.setattr(module, "new_id", made.new)
    still = SimpleNamespace(time=lambda: 0.0, gmtime=lambda _: (), strftime=lambda *_: "then")
    for timed in (record_store, incarnations):
        patch.setattr(timed, "time", still)
    encode = functools.cache(attempts.encode_abandoned)
    patch.setattr(attempts, "encode_abandoned", encode)
    patch.setattr(commit_protocol, "encode_abandoned", encode)
    patch.setattr(index_json, "decode", functools.cache(index_json.decode))
    for name in ("_list_or_create", "_abandon_lower_rivals", "_store_claim"):
        patch.setattr(commit_protocol, name, _forgetting(getattr(commit_protocol, name)))
    return made


def _forgetting(step: Callable[..., object]) -> Callable[..., object]:
    def run(storage: Storage, path: str, *rest: Any, **options: Any) -> object:
        # Of what the claim has seen before, only these are used after.
        claim = sys._getframe(1).f_locals
        if isinstance(storage, Replay):
            storage.forget_answers((step.__name__, claim["attempt"], tuple(claim["new_folders"])))
        return step(storage, path, *rest, **options)

    return run


def is_private(call: Call) -> bool:
    """Say whether a call touches only temporary names and trash, which nobody else looks at.

    Others can only take away the whole folder; scenarios with two programs interleave all.
    """
    method, path = call[:2]
    if method == "rename":
        return call[2].endswith(filenames.CLAIM)
    return method == "create" or ".trash-" in path or ".tmp" in path
