"""Parse the bytes of a `.shrew` file, version 1 or 2, strictly, and encode the same bytes.

    "SHRW", version: u32; everything is little-endian
    version 1: tensors
    version 2: sections until the byte 0xFF, each after a byte with its number
        0x01 tensors
        0x02 type: text; count: u32; (text, f64)...; count: u32; (text, count: u64, f64...)...
        0x03 epoch: u64; global step: u64; best loss: f64; count: u32; f64...
    tensors: count: u32; (text, dtype: u8, ndim: u32, dims: u32..., nbytes: u64, data)...
    text: nbytes: u32, UTF-8

Counts and lengths are not trusted: memory and loops are bounded by the bytes left in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeGuard, TypeVar

from dist_ckpt.core.format.checksums import Buffer
from dist_ckpt.core.format.dtypes import DTYPES
from dist_ckpt.core.format.geometry import Shape, check_shape
from dist_ckpt.core.format.index.index_json import MAX_FQN_CHARS
from dist_ckpt.core.storage import ReadableFile
from dist_ckpt.errors import CorruptError, IncompatibleError
from dist_ckpt.message_text import listed

T = TypeVar("T")

_MAGIC = b"SHRW"
_MODEL, _OPTIMIZER, _METADATA, _END = 1, 2, 3, 0xFF
_PARTS = {_MODEL: "model", _OPTIMIZER: "optimizer", _METADATA: "metadata"}

# A tensor's dtype by its number.
_DTYPES = ("float32", "float64", "uint8", "uint32", "int64", "float16", "bfloat16")
_TAGS = {name: tag for tag, name in enumerate(_DTYPES)}

_MAX_U32, _MAX_U64 = (1 << 32) - 1, (1 << 64) - 1

# The name of a tensor in a checkpoint begins with "model." or with this prefix.
_MAX_NAME_CHARS = MAX_FQN_CHARS - len("optim.buffers.")

# The values of version 2 besides the model, with their defaults.
_TRAINING = {"epoch": 0, "global_step": 0, "best_loss": float("inf"), "loss_history": []}

_REMEDY = "get the file again, or write it again"


class PlainTensor(Protocol):
    """A tensor with row-major, little-endian bytes: `Array`, `StoredTensor` or `FileTensor`."""

    @property
    def dtype(self) -> str:
        """The dtype's name, as torch has it."""

    @property
    def shape(self) -> Shape:
        """The sizes of its dimensions."""

    @property
    def nbytes(self) -> int:
        """Its size."""


def is_tensor(value: object) -> TypeGuard[PlainTensor]:
    """Return True for a `PlainTensor`. Tensors of torch and numpy have no dtype that is text."""
    return type(getattr(value, "dtype", None)) is str


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose bytes are in a file, from byte `start` on."""

    dtype: str
    shape: Shape
    start: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


# --- parsing ---------------------------------------------------------------------------------


def parse(file: ReadableFile, label: str) -> dict[str, object]:
    """Return the state in a file: `{"model": {name: tensor}}`, in version 2 also the training.

    Tensors are `FileTensor`s: no data is read. Errors have `label` and the offset of the byte.
    CorruptError for a damaged file. IncompatibleError for another version, an unknown dtype, and
    values that a checkpoint cannot store.
    """
    fields = _FieldReader(file, label)
    if (magic := fields.take(4, "the magic number")) != _MAGIC:
        raise fields.corrupt(f"{magic!r} is not {_MAGIC!r}, the first bytes of a .shrew file", 0)
    version = fields.read_unsigned(4, "the version")
    if version not in (1, 2):
        raise IncompatibleError(f"{label}, byte 4: version {version}: only 1 and 2 are supported")
    state: dict[str, object] = (
        {"model": _read_tensors(fields)} if version == 1 else _read_training(fields)
    )
    if left := fields.left:
        raise fields.corrupt(f"{left} bytes after the end of the contents")
    return state


@dataclass
class _FieldReader:
    """Reads values one after the other. An error has the offset, and the value expected there."""

    file: ReadableFile
    label: str
    at: int = 0

    @property
    def left(self) -> int:
        return self.file.nbytes - self.at

    def corrupt(self, why: str, at: int | None = None) -> CorruptError:
        offset = self.at if at is None else at
        return CorruptError(f"{self.label}, byte {offset}: {why}: {_REMEDY}")

    def incompatible(self, why: str, at: int) -> IncompatibleError:
        return IncompatibleError(f"{self.label}, byte {at}: {why}")

    def check(self, nbytes: int, thing: str) -> None:
        if nbytes > self.left:
            raise self.corrupt(f"{thing} needs {nbytes} bytes, but {self.left} are left")

    def skip(self, nbytes: int, thing: str) -> int:
        """Skip bytes; return the offset of the first."""
        self.check(nbytes, thing)
        start, self.at = self.at, self.at + nbytes
        return start

    def take(self, nbytes: int, thing: str) -> bytes:
        start = self.skip(nbytes, thing)
        data = memoryview(bytearray(nbytes))
        self.file.read_into(start, data)
        return bytes(data)

    def read_unsigned(self, nbytes: int, thing: str) -> int:
        return int.from_bytes(self.take(nbytes, thing), "little")

    def read_floats(self, count: int, thing: str) -> list[float]:
        return list(struct.unpack(f"<{count}d", self.take(8 * count, thing)))

    def read_text(self, thing: str) -> str:
        nbytes, at = self.read_unsigned(4, f"the length of {thing}"), self.at
        data = self.take(nbytes, thing)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{thing} is not UTF-8", at + error.start) from None

    def read_entries(self, min_nbytes: int, thing: str, read: Callable[[str], T]) -> dict[str, T]:
        """Read a count, then as many entries: a name and a value, of at least `min_nbytes`."""
        count = self.read_unsigned(4, f"the number of {thing}s")
        self.check(count * min_nbytes, f"the smallest list of {count} {thing}s")
        fields: dict[str, T] = {}
        for number in range(count):
            at = self.at
            name = self.read_text(f"the name of {thing} {number}")
            if name in fields:
                raise self.corrupt(f"{thing} {number} has the name {_quote(name)} again", at)
            if len(name) > _MAX_NAME_CHARS:
                raise self.incompatible(
                    f"{thing} {number} has a name of {len(name)} characters: {_MAX_NAME_CHARS} "
                    "are the most in a checkpoint",
                    at,
                )
            fields[name] = read(f"{thing} {_quote(name)}")
        return fields


def _read_training(fields: _FieldReader) -> dict[str, object]:
    """Read sections in any order. Missing values get the defaults of shrew's reader."""
    state: dict[str, object] = {"model": {}, **_TRAINING, "loss_history": []}
    seen: set[int] = set()
    while (tag := fields.read_unsigned(1, "the number of a section")) != _END:
        at = fields.at - 1
        if tag not in _PARTS:
            raise fields.corrupt(f"0x{tag:02X} is not the number of a section", at)
        if tag in seen:
            raise fields.corrupt(f"a second {_PARTS[tag]} section", at)
        seen.add(tag)
        if tag == _MODEL:
            state["model"] = _read_tensors(fields)
        elif tag == _OPTIMIZER:
            state["optim"] = {
                "type": fields.read_text("the type of the optimizer"),
                "scalars": fields.read_entries(
                    12, "scalar", lambda label: fields.read_floats(1, label)[0]
                ),
                "buffers": fields.read_entries(
                    12, "buffer", lambda label: _read_buffer(fields, label)
                ),
            }
        else:
            state["epoch"] = fields.read_unsigned(8, "the epoch")
            state["global_step"] = fields.read_unsigned(8, "the global step")
            (state["best_loss"],) = fields.read_floats(1, "the best loss")
            count = fields.read_unsigned(4, "the number of losses")
            state["loss_history"] = fields.read_floats(count, f"a history of {count} losses")
    # In the order in which shrew writes them.
    return {name: state[name] for name in ("model", "optim", *_TRAINING) if name in state}


def _read_buffer(fields: _FieldReader, label: str) -> FileTensor:
    count = fields.read_unsigned(8, f"the length of {label}")
    return FileTensor("float64", (count,), fields.skip(8 * count, f"{label}, of {count} numbers,"))


def _read_tensors(fields: _FieldReader) -> dict[str, FileTensor]:
    return fields.read_entries(17, "tensor", lambda label: _read_tensor(fields, label))


def _read_tensor(fields: _FieldReader, label: str) -> FileTensor:
    at = fields.at
    tag = fields.read_unsigned(1, f"the dtype of {label}")
    if tag >= len(_DTYPES):
        raise fields.incompatible(f"{label} has the dtype {tag}: only 0 to 6 are supported", at)
    dtype, at = DTYPES[_DTYPES[tag]], fields.at
    ndim = fields.read_unsigned(4, f"the number of dimensions of {label}")
    dims = fields.take(4 * ndim, f"{label}: a shape of {ndim} dimensions")
    shape = struct.unpack(f"<{ndim}I", dims)
    try:
        check_shape(shape, dtype.itemsize)
    except ValueError as error:
        raise fields.incompatible(f"{label}: {error}: no checkpoint can store it", at) from None
    at = fields.at
    nbytes, expected = fields.read_unsigned(8, f"the size of {label}"), prod(shape) * dtype.itemsize
    if nbytes != expected:
        why = f"{label} is {dtype.name} {list(shape)}, {expected} bytes, but has {nbytes}"
        raise fields.corrupt(why, at)
    return FileTensor(dtype.name, shape, fields.skip(nbytes, f"the data of {label}"))


def _quote(name: str) -> str:
    return repr(name) if len(name) <= 100 else f"{name[:100]!r}..."


# --- encoding --------------------------------------------------------------------------------


def choose_version(state: Mapping[str, object], version: int | None) -> int:
    """Return the version to write: `version`, or by default 1 for a state that is only a model."""
    if version is not None and (type(version) is not int or version not in (1, 2)):
        raise ValueError(f"version={version!r}: give 1 or 2, or None to choose by the state")
    return version or (2 if set(state) - {"model"} else 1)


def encode(
    state: Mapping[str, object], version: int, read_data: Callable[[PlainTensor], Buffer]
) -> Iterator[Buffer]:
    """Yield the bytes of a file, tensor by tensor; `read_data` returns the data of each.

    Version 1 is only the model. IncompatibleError, before the first bytes, names everything that a
    `.shrew` file cannot store, with remedies.
    """
    if problems := [*_model_problems(state), *(_training_problems(state) if version == 2 else ())]:
        raise IncompatibleError(
            f"a .shrew file of version {version} cannot store this state:"
            f"{listed(['', *problems], '; ').removeprefix(';')}"
        )
    return _encode_parts(state, version, read_data)


def _encode_parts(
    state: Mapping[str, object], version: int, read_data: Callable[[PlainTensor], Buffer]
) -> Iterator[Buffer]:
    yield _MAGIC + _encode_u32(version) + (b"" if version == 1 else bytes([_MODEL]))
    model = _mapping(state["model"])
    yield _encode_u32(len(model))
    for name, tensor in model.items():
        assert is_tensor(tensor)
        dims = b"".join(map(_encode_u32, tensor.shape))
        tag = bytes([_TAGS[tensor.dtype]])
        nbytes = tensor.nbytes.to_bytes(8, "little")
        yield _encode_text(name) + tag + _encode_u32(len(tensor.shape)) + dims + nbytes
        yield read_data(tensor)
    if version == 1:
        return
    if "optim" in state:
        optimizer = _mapping(state["optim"])
        scalars, buffers = _mapping(optimizer["scalars"]), _mapping(optimizer["buffers"])
        yield bytes([_OPTIMIZER]) + _encode_text(str(optimizer["type"])) + _encode_u32(len(scalars))
        for name, value in scalars.items():
            yield _encode_text(name) + struct.pack("<d", value)
        yield _encode_u32(len(buffers))
        for name, tensor in buffers.items():
            assert is_tensor(tensor)
            yield _encode_text(name) + tensor.shape[0].to_bytes(8, "little")
            yield read_data(tensor)
    losses = state["loss_history"]
    assert isinstance(losses, list)
    numbers = struct.pack("<QQd", state["epoch"], state["global_step"], state["best_loss"])
    yield bytes([_METADATA]) + numbers + _encode_u32(len(losses))
    yield struct.pack(f"<{len(losses)}d", *losses) + bytes([_END])


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), "`encode` has checked it"
    return value


def _encode_u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _encode_text(text: str) -> bytes:
    data = text.encode("utf-8")
    return _encode_u32(len(data)) + data


# --- problems --------------------------------------------------------------------------------


def _model_problems(state: Mapping[str, object]) -> Iterator[str]:
    """Yield the parts of the model that no version can store."""
    model = state.get("model")
    if not isinstance(model, Mapping):
        kind = f"'model' is a {type(model).__name__}: give its state_dict()"
        none = "'model' is missing: save the tensors as {'model': {name: tensor}}"
        yield kind if hasattr(model, "state_dict") else none
        return
    for name, tensor in model.items():
        fqn = f"model.{name}"
        if problem := _name_problem(name):
            yield f"{fqn}: {problem}"
        elif isinstance(tensor, Mapping):
            yield f"{fqn} is a dict: move its tensors up, under names such as 'a.b'"
        elif not is_tensor(tensor):
            yield f"{fqn} is a {type(tensor).__name__}, not a tensor: leave it out of the model"
        elif tensor.dtype not in _TAGS:
            yield f"{fqn} is {tensor.dtype}: convert it to one of {', '.join(_DTYPES)}"
        elif max(tensor.shape, default=0) > _MAX_U32:
            yield f"{fqn} has the shape {list(tensor.shape)}: split it, the limit is {_MAX_U32}"


def _training_problems(state: Mapping[str, object]) -> Iterator[str]:
    """Yield the other parts that version 2 cannot store."""
    alone = "or write version 1, which is only the model"
    for name in state:
        if name not in ("model", "optim", *_TRAINING):
            yield f"{_quote(str(name))} is unknown: leave it out, {alone}"
    if "optim" in state:
        yield from _optimizer_problems(state["optim"], alone)
    if missing := [name for name in _TRAINING if name not in state]:
        yield f"{', '.join(missing)} is missing: save it, too, {alone}"
        return
    for name in ("epoch", "global_step"):
        number = state[name]
        if type(number) is not int or not 0 <= number <= _MAX_U64:
            yield f"{name} is {_describe(number)}: make it a whole number from 0 to {_MAX_U64}"
    if type(state["best_loss"]) is not float:
        yield f"best_loss is {_describe(state['best_loss'])}: make it a float"
    losses = state["loss_history"]
    if type(losses) is not list or any(type(loss) is not float for loss in losses):
        yield f"loss_history is {_describe(losses)}: make it a list of floats"


def _optimizer_problems(optimizer: object, alone: str) -> Iterator[str]:
    fields = {"type", "scalars", "buffers"}
    if not isinstance(optimizer, Mapping) or optimizer.keys() != fields:
        description = _describe(optimizer)
        if isinstance(optimizer, Mapping):
            description = f"a mapping with {listed([_quote(str(key)) for key in optimizer])}"
        yield (
            f"optim is {description}: make it a mapping of 'type', 'scalars' and 'buffers', as in "
            f"an import, leave it out, {alone}"
        )
        return
    if problem := _name_problem(optimizer["type"]):
        yield f"optim.type: {problem}"
    for field, is_valid, expected in (
        ("scalars", lambda item: type(item) is float, "a float"),
        ("buffers", _is_buffer, "a float64 tensor of one dimension"),
    ):
        values = optimizer[field]
        if not isinstance(values, Mapping):
            yield f"optim.{field} is {_describe(values)}: make it a mapping"
            continue
        for name, value in values.items():
            if problem := _name_problem(name):
                yield f"optim.{field}.{name}: {problem}"
            elif not is_valid(value):
                yield f"optim.{field}.{name} is {_describe(value)}: make it {expected}"


def _is_buffer(value: object) -> bool:
    return is_tensor(value) and value.dtype == "float64" and len(value.shape) == 1


def _name_problem(name: object) -> str | None:
    if type(name) is not str:
        return f"{_describe(name)} is not text: give a string"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "half a surrogate pair is not valid UTF-8: give another text"
    return None


def _describe(value: object) -> str:
    if is_tensor(value):
        return f"{value.dtype} {list(value.shape)}"
    short = repr(value)
    return short if len(short) <= 60 else f"{short[:57]}..."
