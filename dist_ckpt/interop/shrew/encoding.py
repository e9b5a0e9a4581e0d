"""The bytes of a `.shrew` file, version 1 and 2: parsed strictly, and encoded the same again. Pure.

    "SHRW", version: u32; everything is little-endian
    version 1: tensors
    version 2: sections until the byte 0xFF, each after a byte that says which
        0x01 tensors
        0x02 type: text; count: u32; (text, f64)...; count: u32; (text, count: u64, f64...)...
        0x03 epoch: u64; global step: u64; best loss: f64; count: u32; f64...
    tensors: count: u32; (text, dtype: u8, ndim: u32, dims: u32..., nbytes: u64, data)...
    text: nbytes: u32, UTF-8

No count and no length is believed: nothing is allocated, and no loop begun, that the bytes which
are left in the file cannot fill.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Protocol, TypeVar

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.index.catalog_json import MAX_FQN_CHARS
from dist_ckpt.core.format.layout import check_shape
from dist_ckpt.errors import CorruptError, IncompatibleError, listed
from dist_ckpt.interop.writers.plain_states import FileTensor, PlainTensor, is_tensor

T = TypeVar("T")

_MAGIC = b"SHRW"
_MODEL, _OPTIMIZER, _METADATA, _END = 1, 2, 3, 0xFF
_PARTS = {_MODEL: "model", _OPTIMIZER: "optimizer", _METADATA: "metadata"}

# A tensor's dtype by its number.
_DTYPES = ("float32", "float64", "uint8", "uint32", "int64", "float16", "bfloat16")
_TAGS = {name: tag for tag, name in enumerate(_DTYPES)}

_MAX_U32, _MAX_U64 = (1 << 32) - 1, (1 << 64) - 1

# A name becomes that of a tensor in a checkpoint, behind one of these.
_MAX_NAME_CHARS = MAX_FQN_CHARS - len("optim.buffers.")

# What a version 2 has besides the model, as it is where a file says nothing of it.
_TRAINING = {"epoch": 0, "global_step": 0, "best_loss": float("inf"), "loss_history": []}

_REMEDY = "get the file again, or write it anew"


class ShrewSource(Protocol):
    """Bytes that can be read at any place."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return so many bytes; they are there."""


# --- parsing ---------------------------------------------------------------------------------


def parse(file: ShrewSource, what: str) -> dict[str, object]:
    """Return what a file holds: `{"model": {name: tensor}}`, and of version 2 the training besides.

    Tensors are `FileTensor`s: no data is read. `what` names the file in errors, which say at which
    byte what was found: CorruptError for what is no `.shrew` file, and IncompatibleError for
    another version, an unknown dtype, and what no checkpoint holds.
    """
    fields = _FieldReader(file, what)
    if (magic := fields.take(4, "the magic number")) != _MAGIC:
        raise fields.corrupt(f"{magic!r} is not {_MAGIC!r}, by which a .shrew file begins", 0)
    version = fields.u32("the version")
    if version not in (1, 2):
        raise IncompatibleError(f"{what}, byte 4: version {version}: only 1 and 2 are known")
    if version == 1:
        state: dict[str, object] = {"model": _tensors(fields)}
    else:
        state = _training(fields)
    if left := fields.left:
        raise fields.corrupt(f"{left} bytes after the end of what the file says it holds")
    return state


class _FieldReader:
    """Reads one value after another. Every error says where, and what was to be there."""

    def __init__(self, file: ShrewSource, what: str) -> None:
        self.at = 0
        self._file = file
        self._what = what

    @property
    def left(self) -> int:
        return self._file.nbytes - self.at

    def corrupt(self, fact: str, at: int | None = None) -> CorruptError:
        offset = self.at if at is None else at
        return CorruptError(f"{self._what}, byte {offset}: {fact}: {_REMEDY}")

    def incompatible(self, fact: str, at: int) -> IncompatibleError:
        return IncompatibleError(f"{self._what}, byte {at}: {fact}")

    def check(self, nbytes: int, thing: str) -> None:
        if nbytes > self.left:
            raise self.corrupt(f"{thing} takes {nbytes} bytes, and {self.left} are left")

    def skip(self, nbytes: int, thing: str) -> int:
        """Pass by some bytes; return where they begin."""
        self.check(nbytes, thing)
        start, self.at = self.at, self.at + nbytes
        return start

    def take(self, nbytes: int, thing: str) -> bytes:
        return self._file.read(self.skip(nbytes, thing), nbytes)

    def u8(self, thing: str) -> int:
        return self.take(1, thing)[0]

    def u32(self, thing: str) -> int:
        return int.from_bytes(self.take(4, thing), "little")

    def u64(self, thing: str) -> int:
        return int.from_bytes(self.take(8, thing), "little")

    def floats(self, count: int, thing: str) -> list[float]:
        return list(struct.unpack(f"<{count}d", self.take(8 * count, thing)))

    def text(self, thing: str) -> str:
        nbytes, at = self.u32(f"the length of {thing}"), self.at
        data = self.take(nbytes, thing)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{thing} is not UTF-8", at + error.start) from None

    def named(self, least: int, thing: str, read: Callable[[str], T]) -> dict[str, T]:
        """Read a count, and so many values behind their names; each takes `least` bytes or more."""
        count = self.u32(f"the number of {thing}s")
        self.check(count * least, f"{count} {thing}s, the least that they can be,")
        fields: dict[str, T] = {}
        for number in range(count):
            at = self.at
            name = self.text(f"the name of {thing} {number}")
            if name in fields:
                raise self.corrupt(f"{thing} {number} is named {_shown(name)}, as one before", at)
            if len(name) > _MAX_NAME_CHARS:
                raise self.incompatible(
                    f"{thing} {number} has a name of {len(name)} characters: {_MAX_NAME_CHARS} "
                    "are the most in a checkpoint",
                    at,
                )
            fields[name] = read(f"{thing} {_shown(name)}")
        return fields


def _training(fields: _FieldReader) -> dict[str, object]:
    """Read sections in any order; what is in none of them is as shrew's own reader has it."""
    state: dict[str, object] = {"model": {}, **_TRAINING, "loss_history": []}
    seen: set[int] = set()
    while (tag := fields.u8("the number of a section")) != _END:
        at = fields.at - 1
        if tag not in _PARTS:
            raise fields.corrupt(f"0x{tag:02X} is the number of no section", at)
        if tag in seen:
            raise fields.corrupt(f"a second {_PARTS[tag]} section", at)
        seen.add(tag)
        if tag == _MODEL:
            state["model"] = _tensors(fields)
        elif tag == _OPTIMIZER:
            state["optim"] = _optimizer(fields)
        else:
            state["epoch"] = fields.u64("the epoch")
            state["global_step"] = fields.u64("the global step")
            (state["best_loss"],) = fields.floats(1, "the best loss")
            count = fields.u32("the number of losses")
            state["loss_history"] = fields.floats(count, f"a history of {count} losses")
    # The order in which they stand in a file.
    return {name: state[name] for name in ("model", "optim", *_TRAINING) if name in state}


def _optimizer(fields: _FieldReader) -> dict[str, object]:
    return {
        "type": fields.text("the type of the optimizer"),
        "scalars": fields.named(12, "scalar", lambda label: fields.floats(1, label)[0]),
        "buffers": fields.named(12, "buffer", lambda label: _buffer(fields, label)),
    }


def _buffer(fields: _FieldReader, what: str) -> FileTensor:
    count = fields.u64(f"the length of {what}")
    return FileTensor("float64", (count,), fields.skip(8 * count, f"{what}, of {count} numbers,"))


def _tensors(fields: _FieldReader) -> dict[str, FileTensor]:
    return fields.named(17, "tensor", lambda label: _tensor(fields, label))


def _tensor(fields: _FieldReader, what: str) -> FileTensor:
    at = fields.at
    tag = fields.u8(f"the dtype of {what}")
    if tag >= len(_DTYPES):
        raise fields.incompatible(f"{what} has the dtype {tag}: only 0 to 6 are known", at)
    dtype, at = DTYPES[_DTYPES[tag]], fields.at
    ndim = fields.u32(f"the number of dimensions of {what}")
    dims = fields.take(4 * ndim, f"{what}: a shape of {ndim} dimensions")
    shape = struct.unpack(f"<{ndim}I", dims)
    try:
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise fields.incompatible(f"{what}: {error}, so that no checkpoint holds it", at) from None
    at = fields.at
    nbytes, expected = fields.u64(f"the size of {what}"), prod(shape) * dtype.itemsize
    if nbytes != expected:
        fact = f"{what} is {dtype.name} {list(shape)}, {expected} bytes, but has {nbytes}"
        raise fields.corrupt(fact, at)
    return FileTensor(dtype.name, shape, fields.skip(nbytes, f"the data of {what}"))


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 100 else f"{name[:100]!r}..."


# --- encoding --------------------------------------------------------------------------------


def version_for(state: Mapping[str, object], version: int | None) -> int:
    """Return the version in which a state is to be written: 1 if it is a model and no more."""
    if version is not None and (type(version) is not int or version not in (1, 2)):
        raise ValueError(f"version={version!r}: give 1 or 2, or None for the one that fits")
    return version or (2 if set(state) - {"model"} else 1)


def encode(
    state: Mapping[str, object], version: int, data_of: Callable[[PlainTensor], Buffer]
) -> Iterator[Buffer]:
    """Yield the bytes of a file, one tensor after another: `data_of` returns those of each.

    Version 1 takes the model alone. Raises IncompatibleError, before anything is yielded, for what
    a `.shrew` file cannot hold: it names all of that, and what can be done.
    """
    if problems := [*_model_problems(state), *(_problems(state) if version == 2 else ())]:
        raise IncompatibleError(
            f"a .shrew file of version {version} cannot hold this state:"
            f"{listed(['', *problems], '; ').removeprefix(';')}"
        )
    return _encoded(state, version, data_of)


def _encoded(
    state: Mapping[str, object], version: int, data_of: Callable[[PlainTensor], Buffer]
) -> Iterator[Buffer]:
    yield _MAGIC + _u32(version) + (b"" if version == 1 else bytes([_MODEL]))
    model = _mapping(state["model"])
    yield _u32(len(model))
    for name, tensor in model.items():
        assert is_tensor(tensor)
        dims = b"".join(map(_u32, tensor.shape))
        tag = bytes([_TAGS[tensor.dtype]])
        yield _text(name) + tag + _u32(len(tensor.shape)) + dims + _u64(tensor.nbytes)
        yield data_of(tensor)
    if version == 1:
        return
    if "optim" in state:
        yield from _encoded_optimizer(_mapping(state["optim"]), data_of)
    losses = state["loss_history"]
    assert isinstance(losses, list)
    whole = struct.pack("<QQd", state["epoch"], state["global_step"], state["best_loss"])
    yield bytes([_METADATA]) + whole + _u32(len(losses))
    yield struct.pack(f"<{len(losses)}d", *losses) + bytes([_END])


def _encoded_optimizer(
    optimizer: Mapping[str, object], data_of: Callable[[PlainTensor], Buffer]
) -> Iterator[Buffer]:
    scalars, buffers = _mapping(optimizer["scalars"]), _mapping(optimizer["buffers"])
    yield bytes([_OPTIMIZER]) + _text(str(optimizer["type"])) + _u32(len(scalars))
    for name, value in scalars.items():
        yield _text(name) + struct.pack("<d", value)
    yield _u32(len(buffers))
    for name, tensor in buffers.items():
        assert is_tensor(tensor)
        yield _text(name) + _u64(tensor.shape[0])
        yield data_of(tensor)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), "`encode` has looked"
    return value


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return _u32(len(data)) + data


# --- what cannot be written ------------------------------------------------------------------


def _model_problems(state: Mapping[str, object]) -> Iterator[str]:
    """Yield what of the model no version can hold."""
    model = state.get("model")
    if not isinstance(model, Mapping):
        kind = f"'model' is a {type(model).__name__}: give its state_dict()"
        none = "there is no 'model': save the tensors as {'model': {name: tensor}}"
        yield kind if hasattr(model, "state_dict") else none
        return
    for name, tensor in model.items():
        fqn = f"model.{name}"
        if problem := _name_problem(name):
            yield f"{fqn}: {problem}"
        elif isinstance(tensor, Mapping):
            yield f"{fqn} is a dict: put its tensors beside the others, under names such as 'a.b'"
        elif not is_tensor(tensor):
            yield f"{fqn} is a {type(tensor).__name__}: leave out of the model what is no tensor"
        elif tensor.dtype not in _TAGS:
            yield f"{fqn} is {tensor.dtype}: convert it to one of {', '.join(_DTYPES)}"
        elif max(tensor.shape, default=0) > _MAX_U32:
            yield f"{fqn} has the shape {list(tensor.shape)}: split it, {_MAX_U32} is the most"


def _problems(state: Mapping[str, object]) -> Iterator[str]:
    """Yield what of all but the model version 2 cannot hold."""
    alone = "or write version 1, which takes the model alone"
    for name in state:
        if name not in ("model", "optim", *_TRAINING):
            yield f"it has no place for {_shown(str(name))}: leave it out, {alone}"
    if "optim" in state:
        yield from _optimizer_problems(state["optim"], alone)
    if missing := [name for name in _TRAINING if name not in state]:
        yield f"{', '.join(missing)} is missing: save that as well, {alone}"
        return
    for name in ("epoch", "global_step"):
        number = state[name]
        if type(number) is not int or not 0 <= number <= _MAX_U64:
            yield f"{name} is {_value(number)}: make it a whole number from 0 to {_MAX_U64}"
    if type(state["best_loss"]) is not float:
        yield f"best_loss is {_value(state['best_loss'])}: make it a float"
    losses = state["loss_history"]
    if type(losses) is not list or any(type(loss) is not float for loss in losses):
        yield f"loss_history is {_value(losses)}: make it a list of floats"


def _optimizer_problems(optimizer: object, alone: str) -> Iterator[str]:
    fields = {"type", "scalars", "buffers"}
    if not isinstance(optimizer, Mapping) or optimizer.keys() != fields:
        description = _value(optimizer)
        if isinstance(optimizer, Mapping):
            description = f"a mapping with {listed([_shown(str(key)) for key in optimizer])}"
        yield (
            f"optim is {description}: make it a mapping of 'type', 'scalars' and 'buffers', as an "
            f"imported one is, leave it out, {alone}"
        )
        return
    if problem := _name_problem(optimizer["type"]):
        yield f"optim.type: {problem}"
    for field, is_good, wanted in (
        ("scalars", lambda item: type(item) is float, "a float"),
        ("buffers", _is_buffer, "a float64 tensor of one dimension"),
    ):
        values = optimizer[field]
        if not isinstance(values, Mapping):
            yield f"optim.{field} is {_value(values)}: make it a mapping"
            continue
        for name, value in values.items():
            if problem := _name_problem(name):
                yield f"optim.{field}.{name}: {problem}"
            elif not is_good(value):
                yield f"optim.{field}.{name} is {_value(value)}: make it {wanted}"


def _is_buffer(value: object) -> bool:
    return is_tensor(value) and value.dtype == "float64" and len(value.shape) == 1


def _name_problem(name: object) -> str | None:
    if type(name) is not str:
        return f"{_value(name)} where a text is to be: give a string"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "half a surrogate pair is no UTF-8: give another text"
    return None


def _value(value: object) -> str:
    if is_tensor(value):
        return f"{value.dtype} {list(value.shape)}"
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."
