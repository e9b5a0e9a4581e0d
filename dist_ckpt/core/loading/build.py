"""`dc.build`: make a model from its stored configuration, and fill it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from dist_ckpt.core.checkpoint.checkpoint import count_parameters
from dist_ckpt.core.checkpoint.open_checkpoint import OpenCheckpoint
from dist_ckpt.core.checkpoint.opener import NATIVE, Opener
from dist_ckpt.core.comm.exchange.channel import check_equal_on_all_ranks
from dist_ckpt.core.comm.process_group import session_of
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.format.index.model_description import config_of, kind_of
from dist_ckpt.core.format.objects.plain_codec import decode_value, encode_value
from dist_ckpt.core.format.strict_json import is_text
from dist_ckpt.core.loading.load import advice_on_damage, load_together
from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.runtime.typed_msgpack import Message
from dist_ckpt.core.state.module_tensors import find_unsaved_meta, has_own_load, named_modules
from dist_ckpt.core.state.tensors.plain_torch import make_torch_value
from dist_ckpt.core.storage import Storage, open_storage
from dist_ckpt.errors import IncompatibleError
from dist_ckpt.message_text import listed

Model = TypeVar("Model", bound=nn.Module)


class _BuildRequest(Message, frozen=True):
    """The request of one rank; it must be the same on all ranks."""

    path: str
    kinds: tuple[str, ...]
    component: str


class _ModelDescription(Message, frozen=True):
    """The checkpoint that rank 0 has resolved, its kind and its encoded configuration.

    `num_parameters` is the number of parameters of the component, or None if it is unknown.
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

    `table` maps each `kind` of `dc.save` to a function. The function gets a copy of the saved
    `config`, and returns an `nn.Module` with the layout and device of this job. No class is looked
    up by a stored name. Then the model is filled from `component`, the key that it had in the saved
    state. All of the component is loaded and nothing else, with the checks of `dc.load`.

    Raises IncompatibleError if the checkpoint was saved without `kind=` or `config=`, or if the
    table lacks the kind. If the model does not fit, the message has the counts of parameters.
    Otherwise raises the errors of `dc.load` and of the function.
    """
    session = session_of(group)
    with ExitStack() as leases, advice_on_damage(session):
        description, model = _make_model(session, path, table, component, opener, leases)
        kind, include = description.kind, f"{glob.escape(component)}.*"
        # The load compares both: a checkpoint that replaced this one may be of another kind.
        config: dict[str, object] = decode_value(description.config, make=make_torch_value)
        options = LoadOptions(include=include, config=config, kind=kind)
        state, resolved = {component: model}, description.path
        try:
            load_together(session, state, resolved, options, memory=opener.memory, opener=opener)
        except IncompatibleError as error:
            raise IncompatibleError(
                f"{error}\n{_counts_text(description, model, component)}"
            ) from error
    return model


def _make_model(
    session: Session,
    path: str | os.PathLike[str],
    table: Mapping[str, Callable[[Any], Model]],
    component: str,
    opener: Opener,
    leases: ExitStack,
) -> tuple[_ModelDescription, Model]:
    """Resolve the checkpoint and make its model, on all ranks or on none."""
    with session.operation(f"build of {path}"):
        with session.channel.exchange("describe") as describing:
            _check_arguments(table, component)
            storage, storage_path = open_storage(path)
            request = _BuildRequest(storage_path, tuple(sorted(table)), component)
            gathered = describing.gather(request)
            if gathered is not None:
                check_equal_on_all_ranks("build", gathered)
                describing.decide(_describe(storage, gathered[0], opener, leases))
        description = describing.result(_ModelDescription)
        with session.channel.exchange("make"):
            kind = description.kind
            model = table[kind](decode_value(description.config, make=make_torch_value))
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"table[{kind!r}] has returned a {type(model).__name__}: return the model"
                )
            _check_buffers(model, kind)
    return description, model


def _check_buffers(model: nn.Module, kind: str) -> None:
    """Raise IncompatibleError for meta tensors that no state dict has: the load cannot fill them.

    The `load_state_dict` of a class, or a hook after it, may compute them.
    """
    modules = named_modules(model)
    names = find_unsaved_meta(modules, with_attributes=True)
    if names and not has_own_load(model, modules):
        raise IncompatibleError(
            f"table[{kind!r}] has made {listed(names)} on the meta device, and no state dict has "
            f"them (persistent=False): compute them in table[{kind!r}], on a real device"
        )


def _check_arguments(table: object, component: object) -> None:
    """Raise TypeError for arguments that are not valid."""
    if not isinstance(table, Mapping) or not all(type(kind) is str for kind in table):
        raise TypeError('table: give a dict from each kind to a function, such as {"ddl": Ddl}')
    if bad := [kind for kind, maker in table.items() if not callable(maker)]:
        raise TypeError(f"table[{bad[0]!r}] cannot be called: give a class, or a function")
    if type(component) is not str or not component or not is_text(component):
        raise TypeError(f'component={component!r}: give the key of the model, such as "model"')


def _describe(
    storage: Storage, request: _BuildRequest, opener: Opener, leases: ExitStack
) -> _ModelDescription:
    """Resolve a checkpoint, and return its description. Rank 0 only."""
    path = opener.resolve(storage, request.path, leases)
    opened = OpenCheckpoint.at(storage, path)
    metadata = opened.objects().metadata
    kind, config = kind_of(metadata), config_of(metadata)
    if kind is None or config is None:
        lacking = "kind=" if kind is None else "config="
        raise IncompatibleError(
            f"{path} was saved without {lacking}: make its model yourself, and call dc.load"
        )
    if kind not in request.kinds:
        raise IncompatibleError(
            f"{path} has the kind {kind!r}, but the table has only {listed(request.kinds)}: add it"
        )
    catalog = opened.catalog
    names = [*catalog.tensors, *catalog.aliases, *catalog.values]
    if not any(name.startswith(f"{request.component}.") for name in names):
        components = dict.fromkeys(name.partition(".")[0] for name in names if "." in name)
        raise IncompatibleError(
            f"{path} has no component {request.component!r}: give component= one of "
            f"{listed([*components])}"
        )
    counts = count_parameters(catalog, opened.value, request.component)
    num_parameters = None if counts is None else counts.num_parameters
    return _ModelDescription(path, kind, encode_value(dict(config)), num_parameters)


def _counts_text(description: _ModelDescription, model: nn.Module, component: str) -> str:
    num_here = sum(parameter.numel() for parameter in model.parameters())
    num_stored = description.num_parameters
    stored = "unknown" if num_stored is None else str(num_stored)
    return (
        f"The model that table[{description.kind!r}] made has {num_here} parameters on this rank; "
        f"those of {component!r} in the checkpoint: {stored}"
    )
