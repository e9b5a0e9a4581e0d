"""The private names of Lightning that the callback depends on, and nothing else.

Each is looked for before a fit begins, as Lightning may move them in any release.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

from dist_ckpt.errors import IncompatibleError

# Where it is, seen from the Trainer; and for what.
NEEDED = (
    ("_results", "which loop logs"),
    ("_logger_connector.metrics", "what it has logged"),
    ("_signal_connector._original_handlers", "handlers that come back when the fit ends"),
    ("_checkpoint_connector.dump_checkpoint", "all that Lightning saves but tensors"),
    ("_checkpoint_connector._loaded_checkpoint", "... and that it restores"),
    ("_checkpoint_connector.restore_model", "hooks that look at it"),
    ("_checkpoint_connector.restore_datamodule", "the data module's state"),
    ("_checkpoint_connector.restore_callbacks", "the callbacks' states"),
    ("fit_loop._restarting", "that a fit goes on between epochs"),
    ("fit_loop._combined_loader", "loaders that know where they are"),
    ("fit_loop._load_combined_loader_states", "the first order of the data is drawn next"),
    ("fit_loop.on_advance_end", "an epoch is done"),
    ("fit_loop.epoch_loop.on_run_start", "an epoch's order is drawn"),
    ("fit_loop.epoch_loop.on_advance_end", "a batch is done"),
    ("fit_loop.epoch_loop.batch_progress", "how many were had"),
    ("fit_loop.epoch_loop._skip_next_val", "a batch that had its end before the resume"),
    ("fit_loop.epoch_loop._num_ready_batches_reached", "whether it was the last of its epoch"),
)

NEEDED_OF_LOADER = (("_iterator", "whether an epoch's order was drawn"),)


def check_names(trainer: Any) -> None:
    """Raise IncompatibleError if this Lightning lacks a name that the callback depends on."""
    loader = sys.modules[type(trainer.fit_loop).__module__].CombinedLoader([])
    needed = [(trainer, name) for name, _ in NEEDED]
    needed += [(loader, name) for name, _ in NEEDED_OF_LOADER]
    for owner, name in needed:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            raise IncompatibleError(
                f"{_version_of(trainer)} has no {type(owner).__name__}.{name}: use 2.6, which this "
                f"was tried with, or dc.Checkpointer in a loop of your own"
            ) from None


def package_of(trainer: Any) -> str:
    """Return the package that a Trainer is of, whatever class was derived: it has two names."""
    return type(trainer).__mro__[-2].__module__.partition(".")[0]


def _version_of(trainer: Any) -> str:
    package = package_of(trainer)
    return f"{package} {getattr(sys.modules[package], '__version__', 'of no known version')}"
