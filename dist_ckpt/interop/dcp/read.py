"""Read folders of torch.distributed.checkpoint: `.metadata` and the files that it names.

Each part of a tensor, and each value, is an archive of torch.save at an offset of a file. Pickles
are read without unpickling them. The format is in torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from dist_ckpt.core.format.geometry import Region, Shape
from dist_ckpt.core.format.objects.plain_types import DTypeValue, Size
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CorruptError, IncompatibleError, NotFoundError
from dist_ckpt.interop.readers import restricted_pickle
from dist_ckpt.interop.readers.nested_state import ImportFilter, NestedState, Path, join_path
from dist_ckpt.interop.readers.restricted_pickle import (
    PickledRecord,
    PlaceholderFactory,
    UnknownObject,
    quote,
    record_factory,
    unknown_error,
)
from dist_ckpt.interop.readers.torch_pickles import TORCH_NAMES, TensorView
from dist_ckpt.interop.readers.virtual_checkpoint import ForeignChunk, ForeignState, ForeignTensor
from dist_ckpt.interop.registry import (
    DCP_METADATA,
    DCP_METADATA_OF_RANK,
    is_file,
    open_foreign_file,
    read_bytes,
)
from dist_ckpt.interop.torch_save.read import Archive

_MAX_METADATA_NBYTES = 1 << 30

_T = TypeVar("_T")


class _Properties(PickledRecord):
    """The properties of a tensor: only the dtype, the first one, is used."""

    def set_state(self, state: object) -> None:
        """Set the dtype from the tuple that torch writes."""
        if not isinstance(state, tuple) or not state:
            raise TypeError("the properties of a tensor must be a tuple")
        super().set_state({"dtype": state[0]})


_MODULE = "torch.distributed.checkpoint"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # of older versions of torch
_DCP_NAMES: Mapping[str, object] = {
    **TORCH_NAMES,
    **{
        f"{_MODULE}.metadata {name}": record_factory(name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )
    },
    **{
        f"{module} TensorProperties": record_factory("TensorProperties", _Properties)
        for module in (f"{_MODULE}.metadata", _OLD_MODULE)
    },
    **{
        name: PlaceholderFactory(name.split()[1], lambda value: value)
        for name in (
            f"{_MODULE}.metadata _MEM_FORMAT_ENCODING",
            f"{_OLD_MODULE} MEM_FORMAT_ENCODING",
            "torch.serialization _get_layout",
        )
    },
    f"{_MODULE}.filesystem _StorageInfo": record_factory("_StorageInfo"),
}


@dataclass(frozen=True, slots=True, order=True)
class _Location:
    """The location of an item, which is an archive of torch.save."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a tensor, or a value if it has no region."""

    fqn: str
    location: _Location
    region: Region | None = None


def read(storage: Storage, folder: str, import_filter: ImportFilter) -> ForeignState:
    """Return the state in a folder, with the names that `dc.save` would use.

    NotFoundError if the metadata, or a file that it names, is missing. CorruptError,
    IncompatibleError for damaged files, or values that cannot be stored.
    """
    nested = NestedState(folder, import_filter)
    add_folder(nested, storage, folder)
    return nested.state()


def add_folder(
    nested: NestedState,
    storage: Storage,
    folder: str,
    map_path: Callable[[Path], Path] = lambda path: path,
    *,
    keep_unknown: bool = False,
) -> None:
    """Add the state in a folder; `map_path` returns the new path for each path in it.

    `keep_unknown` is for metadata that also describes other things than the folder's contents.
    """
    # As in DCP, where a state dict that is loaded has the versions of the live modules.
    nested.versions = None
    path = f"{folder}/{DCP_METADATA}"
    nested.has_text_keys = True
    try:
        data = read_bytes(storage, path, _MAX_METADATA_NBYTES)
    except NotFoundError:
        raise missing_metadata_error(storage, folder) from None
    metadata = restricted_pickle.read(data, _DCP_NAMES, path, keep_unknown=keep_unknown)
    contents = _MetadataContents(path, metadata)
    paths = {fqn: map_path(old_path) for fqn, old_path in contents.paths.items()}
    names = {fqn: join_path(new_path) for fqn, new_path in paths.items()}
    chunks: dict[str, list[ForeignChunk]] = {
        fqn: [ForeignChunk(Region.whole(shape), path, 0)] if 0 in shape else []
        for fqn, (_, shape) in contents.tensors.items()
    }
    wanted = {fqn for fqn, name in names.items() if not nested.excludes(name)}
    tied = contents.find_tied(wanted)
    items = [item for item in contents.items if item.fqn in wanted and item.fqn not in tied]
    for archive, item in _open_archives(storage, folder, items):
        value = archive.read()
        if item.region is None:
            nested.add(paths[item.fqn], value, archive)
        else:
            chunks[item.fqn].append(_locate_part(contents, item, archive, value, folder))
    for fqn, (dtype, shape) in contents.tensors.items():
        if fqn in tied:
            nested.add_alias(paths[fqn], names[tied[fqn]])
            continue
        if fqn in wanted and not chunks[fqn]:
            raise CorruptError(f"{path}: {fqn} has no part; use another checkpoint")
        tensor = ForeignTensor(names[fqn], dtype, shape, tuple(chunks[fqn]))
        nested.add_tensor(paths[fqn], tensor)


def missing_metadata_error(storage: Storage, folder: str) -> NotFoundError:
    """Return the error for a folder without the metadata of all ranks."""
    if is_file(storage, f"{folder}/{DCP_METADATA_OF_RANK}"):
        return NotFoundError(
            f"{folder} has metadata of single ranks, such as {DCP_METADATA_OF_RANK}, and none of "
            f"all ranks: it was saved with no_dist=True or use_collectives=False. Load it with "
            f"dcp.load and the same option, and save it again without that option"
        )
    return NotFoundError(
        f"{folder}/{DCP_METADATA}: the file does not exist, so {folder} is not a checkpoint of "
        f"torch.distributed.checkpoint, or its save did not end; check the path"
    )


def _locate_part(
    contents: _MetadataContents, item: _Item, archive: Archive, value: object, folder: str
) -> ForeignChunk:
    """Return the location of a tensor's part. CorruptError if it contradicts the metadata."""
    dtype, _ = contents.tensors[item.fqn]
    label = f"{folder}/{item.location.file}, {item.fqn}"
    if not isinstance(value, TensorView) or item.region is None:
        raise CorruptError(f"{label}: {quote(value)} in place of a tensor; use another checkpoint")
    if (value.dtype, value.shape) != (dtype, item.region.shape):
        raise CorruptError(
            f"{label}: {list(value.shape)} of {value.dtype}, but the metadata says "
            f"{list(item.region.shape)} of {dtype}; use another checkpoint"
        )
    return replace(archive.locate(value, item.fqn), cell=item.region)


def _open_archives(
    storage: Storage, folder: str, items: list[_Item]
) -> Iterator[tuple[Archive, _Item]]:
    """Yield the items with their archives, in the order of the files."""
    ordered = sorted(items, key=lambda item: item.location)
    for name, group in groupby(ordered, key=lambda item: item.location.file):
        items_in_file, path = [*group], f"{folder}/{name}"
        try:
            file = open_foreign_file(storage, path)
        except NotFoundError:
            raise NotFoundError(
                f"{path}: the file does not exist, but {DCP_METADATA} names it for "
                f"{items_in_file[0].fqn}; copy it there, or use another checkpoint"
            ) from None
        end = 0
        with closing(file):
            for item in items_in_file:
                location, label = item.location, f"{path}, {item.fqn}"
                if location.start < end:
                    raise CorruptError(f"{label}: it overlaps another item; use another checkpoint")
                end = location.start + location.nbytes
                yield Archive(file, path, location.start, location.nbytes, label), item


class _MetadataContents:
    """The checked contents of the metadata: tensors with dtype and shape, items, nested paths."""

    def __init__(self, path: str, metadata: object) -> None:
        self._path = path
        fields = self._expect_record(metadata, "Metadata")
        self._locations = dict(self._read_locations(fields.get("storage_data")))
        entries = self._expect(fields.get("state_dict_metadata"), dict)
        self.tensors: dict[str, tuple[str, Shape]] = {}
        self.items: list[_Item] = []
        for fqn, entry in entries.items():
            self._add(self._expect(fqn, str), entry)
        planned = fields.get("planner_data")
        nested = planned if isinstance(planned, dict) else {}
        self.paths = {fqn: _check_path(fqn, nested.get(fqn)) for fqn in entries}

    def find_tied(self, wanted: Collection[str]) -> dict[str, str]:
        """Return the other names of tied tensors, each with the tensor's first name.

        All parts of tied tensors have the same locations: `export_folder` of this library writes
        them once. DCP itself writes each of them.
        """
        parts: dict[str, list[tuple[Region, _Location]]] = {}
        for item in self.items:
            if item.region is not None and item.fqn in wanted:
                parts.setdefault(item.fqn, []).append((item.region, item.location))
        first: dict[object, str] = {}
        first_names = (
            (fqn, first.setdefault((self.tensors[fqn], *located), fqn))
            for fqn, located in parts.items()
        )
        return {fqn: other for fqn, other in first_names if fqn != other}

    def _add(self, fqn: str, entry: object) -> None:
        if isinstance(entry, PickledRecord) and entry.name == "BytesStorageMetadata":
            self.items.append(_Item(fqn, self._find_location(fqn, None)))
            return
        fields = self._expect_record(entry, "TensorStorageMetadata")
        properties = self._expect_record(fields.get("properties"), "TensorProperties")
        dtype = self._expect(properties.get("dtype"), DTypeValue).name
        shape = self._expect(fields.get("size"), Size).shape
        self.tensors[fqn] = dtype, shape
        for chunk_record in self._expect(fields.get("chunks"), list):
            chunk = self._expect_record(chunk_record, "ChunkStorageMetadata")
            offset, sizes = (
                self._expect(chunk.get(name), Size).shape for name in ("offsets", "sizes")
            )
            if len(offset) != len(shape) or len(sizes) != len(shape):
                raise self._corrupt(f"{fqn} is split in {len(offset)} of {len(shape)} dimensions")
            # Ranks without data of a tensor have parts without elements.
            if 0 not in sizes:
                self.items.append(
                    _Item(fqn, self._find_location(fqn, offset), Region(offset, sizes))
                )

    def _find_location(self, fqn: str, offset: Shape | None) -> _Location:
        location = self._locations.get((fqn, offset))
        if location is None:
            raise self._corrupt(f"no location of {fqn}{f' at {list(offset)}' if offset else ''}")
        return location

    def _read_locations(
        self, value: object
    ) -> Iterator[tuple[tuple[str, Shape | None], _Location]]:
        for key, info in self._expect(value, dict).items():
            index, storage = (
                self._expect_record(key, "MetadataIndex"),
                self._expect_record(info, "_StorageInfo"),
            )
            fqn, offset = self._expect(index.get("fqn"), str), index.get("offset")
            if transforms := storage.get("transform_descriptors"):
                raise IncompatibleError(
                    f"{self._path}: {fqn} was saved with extensions "
                    f"({str(transforms)[:100]}), which cannot be read: save it without them"
                )
            name = self._expect(storage.get("relative_path"), str)
            if "/" in name or "\0" in name or name in ("", ".", ".."):
                raise self._corrupt(
                    f"it names the file {name[:100]!r}, which is not in the same folder"
                )
            start, nbytes = (self._expect(storage.get(n), int) for n in ("offset", "length"))
            if not (0 <= start < 1 << 62 and 0 <= nbytes < 1 << 62):
                raise self._corrupt(f"{fqn} has an impossible offset or size")
            shape = None if offset is None else self._expect(offset, Size).shape
            yield (fqn, shape), _Location(name, start, nbytes)

    def _expect_record(self, value: object, name: str) -> Mapping[str, object]:
        if isinstance(value, UnknownObject):
            raise unknown_error(value, self._path)
        if not isinstance(value, PickledRecord) or value.name != name:
            raise self._corrupt(f"{quote(value)} in place of a {name}")
        return value.fields

    def _expect(self, value: object, cls: type[_T]) -> _T:
        if type(value) is not cls:
            raise self._corrupt(f"{quote(value)} in place of a {cls.__name__}")
        return value

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(f"{self._path}: {why}; use another checkpoint")


def _check_path(fqn: str, path: object) -> Path:
    """Return the path of a key in the nested state dict: `(fqn,)` if the metadata has none."""
    if not isinstance(path, tuple) or not path:
        return (fqn,)
    are_keys = (type(k) is str or (type(k) is int and k.bit_length() <= 64) for k in path)
    return path if all(are_keys) and join_path(path) == fqn else (fqn,)
