"""Which files of a folder are one model, by the names of Hugging Face's libraries and of DCP. Pure.

model.safetensors                                       one file
model.safetensors.index.json                            several, with an index
diffusion_pytorch_model-00001-of-00002.fp16.safetensors several of the variant "fp16"
shard-00001-model-00001-of-00001.safetensors            parts of tensors, which DCP's writer left
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dist_ckpt.core.format import strict_json
from dist_ckpt.core.format.strict_json import Json
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.message_text import listed

MAX_INDEX_NBYTES = 256 << 20  # more than any index has

# A folder may have other models too. The first of these names counts, as in those libraries.
_KNOWN_NAMES = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")

_INDEX = re.compile(r"(.+)(\.safetensors|\.bin)\.index(\.[\w-]+)?\.json")
_NUMBERED = re.compile(r"(.+?)-(\d{5,})-of-(\d{5,})(\.[\w.-]+)?")
_SHARD = re.compile(r"shard-(\d{5,})-(.+)")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: those that `index` names, or `files`.

    `is_sharded` is True if they have parts of tensors. `files` is empty with an index.
    """

    name: str
    index: str | None = None
    files: tuple[str, ...] = ()
    is_sharded: bool = False

    @property
    def path(self) -> str:
        """The file to name for this model alone."""
        return self.index or self.files[0]


def is_index(name: str, suffix: str) -> bool:
    """Return True if a file is named as the index of several files with a suffix."""
    match = _INDEX.fullmatch(name)
    return match is not None and match[2] == suffix


def is_shard(name: str) -> bool:
    """Return True if a file is named as one that has parts of tensors."""
    return _SHARD.fullmatch(name) is not None


def find_model(names: Iterable[str], suffix: str, folder: str) -> ModelFiles | None:
    """Return the model in a folder with these names; None if no file has the suffix.

    NotFoundError names missing files of several. IncompatibleError if there are several models, and
    none has a name of its library.
    """
    models = {model.name: model for model in _list_models(names, suffix)}
    if suffix != ".safetensors":  # anything may be in a .bin
        models = {n: model for n, model in models.items() if n.partition(".")[0] in _KNOWN_NAMES}
    if len(models) > 1 and not models.keys() & {*_KNOWN_NAMES}:
        paths = listed([f"{folder}/{model.path}" for model in models.values()])
        raise IncompatibleError(
            f"{folder} has files of {len(models)} models: give the file of one, or its index: "
            f"{paths}"
        )
    name = next((known for known in _KNOWN_NAMES if known in models), next(iter(models), None))
    if name is None:
        return None
    _check_numbers(models[name], folder)
    return models[name]


def _list_models(names: Iterable[str], suffix: str) -> Iterator[ModelFiles]:
    indexes: dict[str, str] = {}
    files: dict[str, list[str]] = {}
    shards: dict[str, list[str]] = {}
    for name in sorted(names):
        if is_index(name, suffix) and (match := _INDEX.fullmatch(name)):
            indexes[match[1] + (match[3] or "")] = name
        elif name.endswith(suffix):
            shard = _SHARD.fullmatch(name)
            group = shards if shard else files
            group.setdefault(_model_name(shard[2] if shard else name, suffix), []).append(name)
    for name in [*dict.fromkeys([*indexes, *files, *shards])]:
        if name in indexes:
            yield ModelFiles(name, index=indexes[name])
        elif name in files:
            yield ModelFiles(name, files=tuple(files[name]))
        else:
            yield ModelFiles(name, files=tuple(shards[name]), is_sharded=True)


def _model_name(file: str, suffix: str) -> str:
    """Return the name of the model in a file: without its number, but with its variant."""
    name = file.removesuffix(suffix)
    match = _NUMBERED.fullmatch(name)
    return match[1] + (match[4] or "") if match else name


def _check_numbers(model: ModelFiles, folder: str) -> None:
    """Raise NotFoundError if one of several numbered files is missing."""
    matches = {file: _NUMBERED.match(file) for file in model.files}
    numbers = {file: (int(m[2]), int(m[3])) for file, m in matches.items() if m}
    totals = {total for _, total in numbers.values()}
    if len(totals) > 1 or (numbers and len(numbers) < len(model.files)):
        raise IncompatibleError(
            f"{folder} has files of several saves: {listed([*model.files])}: move those of the "
            f"others away"
        )
    present = {number for number, total in numbers.values() if 0 < number <= total}
    num_missing = max(totals, default=0) - len(present)
    if num_missing > 0 and not model.is_sharded:  # DCP's users choose its numbers
        first = next(match for match in matches.values() if match)
        missing = (n for n in range(1, max(totals) + 1) if n not in present)
        names = [
            f"{first[1]}-{n:0{len(first[2])}d}{first.string[first.end(2) :]}"
            for n in islice(missing, 3)
        ]
        more = f" and {num_missing - len(names)} more" if num_missing > len(names) else ""
        raise NotFoundError(
            f"{folder} lacks {', '.join(names)}{more}, of {max(totals)} files of "
            f"{model.name!r}: copy {'it' if num_missing == 1 else 'them'} there"
        )


# --- the index of several files ----------------------------------------------------------------


def parse_index(data: bytes, path: str) -> tuple[dict[str, str], dict[str, Json]]:
    """Return the file of each tensor that an index names, and its metadata."""
    index = expect_object(strict_json.parse(data, path), path)
    weight_map = expect_object(index.get("weight_map"), f"{path}, weight_map")
    if not weight_map:
        raise CorruptError(f"{path} names no tensor; fetch it again")
    metadata = index.get("metadata")
    files = {name: _check_file_name(file, path) for name, file in weight_map.items()}
    return files, metadata if isinstance(metadata, dict) else {}


def _check_file_name(value: Json, path: str) -> str:
    if not isinstance(value, str) or not value or {"/", "\0"} & {*value} or value in (".", ".."):
        raise CorruptError(
            f"{path} names the file {strict_json.quote(value)}, which is not in the same folder"
        )
    return value


def expect_object(value: Json, label: str) -> dict[str, Json]:
    """Return a value that is a JSON object. CorruptError for any other."""
    if not isinstance(value, dict):
        raise CorruptError(f"{label}: {strict_json.quote(value)} is not a JSON object")
    return value
