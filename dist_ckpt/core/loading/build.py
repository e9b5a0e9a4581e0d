"""`dc.build`: a model, made from the stored configuration by the caller's table, and filled."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from dist_ckpt.core.checkpoint.checkpoint import count_parameters
from dist_ckpt.core.checkpoint.open_checkpoint import NATIVE, OpenCheckpoint, Opener
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.index.model_description import config_of, kind_of
from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.loading.load import load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.tensors.plain_torch import make
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import IncompatibleError, listed

Model = TypeVar("Model", bound=nn.Module)


class _BuildRequest(Message, frozen=True):
    """What a rank asks for, the same on all."""

    path: str
    kinds: tuple[str, ...]
    component: str


class _Description(Message, frozen=True):
    """What rank 0 finds: a checkpoint, its kind and its configuration, encoded.

    `num_parameters` are those of the component; None if it is not known.
    """

    path: str
    kind: str
    config: bytes
    num_parameters: int | None


def build(
    path: str | os.PathLike[str],
    table: Mapping[str, Callable[[Any], Model]],
    *,
    component: str = "model",
    group: ProcessGroup | None = None,
    opener: Opener = NATIVE,
) -> Model:
    """Make the model of a checkpoint and fill it. Collective: every rank of `group` calls this.

        model = dc.build("runs/a@latest", {"ddl": Ddl, "baseline": lambda c: Baseline(**c)})

    `table` has, by the `kind` that was given to `save`, what makes the model: it is called with the
    `config` that was given there, a dict of its own, and returns an `nn.Module`, in whatever layout
    and on whatever device the job has now. No class is ever looked up by a stored name. Then the
    model is filled from the `component` of the checkpoint, which is the key that it had in the
    state; all of it, and of nothing else, checked as by `dc.load`.

    Raises IncompatibleError for a checkpoint that was saved without `kind=` or `config=`, for a
    kind that the table lacks, and for a model that does not fit, with the counts of parameters;
    otherwise what `dc.load` raises, and what the maker of the model does.
    """
    ranks = session_of(group)
    with ExitStack() as held:
        describe = partial(_described, opener=opener, held=held)
        found, model = _made(ranks, path, table, component, describe)
        # What took its place meanwhile may be of another kind.
        config: dict[str, object] = decode_value(found.config, make=make)
        options = LoadOptions(include=f"{glob.escape(component)}.*", config=config, kind=found.kind)
        state = {component: model}
        try:
            load_together(ranks, state, found.path, options, kept=opener.memory, opener=opener)
        except IncompatibleError as error:
            raise IncompatibleError(f"{error}\n{_counts(found, model, component)}") from error
    return model


def _made(
    ranks: Session,
    path: str | os.PathLike[str],
    table: Mapping[str, Callable[[Any], Model]],
    component: str,
    describe: Callable[[Storage, _BuildRequest], _Description],
) -> tuple[_Description, Model]:
    """Find the checkpoint and make its model, on all ranks or on none."""
    with ranks.operation(f"build of {path}"):
        with ranks.channel.exchange("describe") as describing:
            _check(table, component)
            storage, own = open_storage(path)
            request = _BuildRequest(own, tuple(sorted(table)), component)
            gathered = describing.gather(request)
            if gathered is not None:
                check_equal_on_all_ranks("build", gathered, _BuildRequest.__struct_fields__)
                describing.decide(describe(storage, gathered[0]))
        found = describing.result(_Description)
        with ranks.channel.exchange("make"):
            model = table[found.kind](decode_value(found.config, make=make))
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"table[{found.kind!r}] has returned a {type(model).__name__}: return the model"
                )
    return found, model


def _check(table: object, component: object) -> None:
    """Raise TypeError for arguments that make no sense."""
    if not isinstance(table, Mapping) or not all(type(kind) is str for kind in table):
        raise TypeError('table: give a dict of what makes each kind, such as {"ddl": Ddl}')
    if bad := [kind for kind, maker in table.items() if not callable(maker)]:
        raise TypeError(f"table[{bad[0]!r}] cannot be called: give a class, or a function")
    if type(component) is not str or not component or not is_text(component):
        raise TypeError(f'component={component!r}: give the key of the model, such as "model"')


def _described(
    storage: Storage, asked: _BuildRequest, *, opener: Opener, held: ExitStack
) -> _Description:
    """Return what a checkpoint says that it is of. Rank 0 only."""
    path = opener.resolve(storage, asked.path, held)
    opened = OpenCheckpoint.at(storage, path)
    metadata = opened.objects().metadata
    kind, config = kind_of(metadata), config_of(metadata)
    if kind is None or config is None:
        lacking = "kind=" if kind is None else "config="
        raise IncompatibleError(
            f"{path} was saved without {lacking}: make its model yourself, and call dc.load"
        )
    if kind not in asked.kinds:
        raise IncompatibleError(
            f"{path} is of the kind {kind!r}, and the table has {listed(list(asked.kinds))}: add it"
        )
    catalog = opened.catalog
    names = [*catalog.tensors, *catalog.aliases, *catalog.values]
    if not any(name.startswith(f"{asked.component}.") for name in names):
        there = dict.fromkeys(name.partition(".")[0] for name in names if "." in name)
        raise IncompatibleError(
            f"{path} holds nothing of {asked.component!r}: give as component= one of "
            f"{listed([*there])}"
        )
    counts = count_parameters(catalog, opened.value, asked.component)
    num_parameters = None if counts is None else counts.num_parameters
    return _Description(path, kind, encode_value(dict(config)), num_parameters)


def _counts(found: _Description, model: nn.Module, component: str) -> str:
    here = sum(parameter.numel() for parameter in model.parameters())
    there = found.num_parameters
    stored = "not known" if there is None else str(there)
    return (
        f"The model that table[{found.kind!r}] made has {here} parameters on this rank; those of "
        f"{component!r} in the checkpoint: {stored}"
    )
