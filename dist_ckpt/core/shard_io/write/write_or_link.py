"""Write the files of a rank in a save, or link unchanged ones to those of earlier saves.

Only files of tensors that match `link_unchanged` of `dc.save` may be linked. The header of a file
has its block digests. So files with equal header digests are equal. First compute the header that a
file of the live tensors would have. If the file of an earlier committed save has an equal header,
link that file.

A save links to the file of the second newest earlier save. If that save was pruned, it links to
the file of the newest one. So as long as two checkpoints are kept, the two newest share no file. A
file has at most `MAX_SHARED` names; then it is written again. So a bad sector damages only some of
the checkpoints; the digests show which.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field, replace

from dist_ckpt.core.planning.plan import FileReceipt
from dist_ckpt.core.runtime.host_memory import BufferPool
from dist_ckpt.core.shard_io.write.shard_writer import (
    NullStorage,
    RankFiles,
    sync_names,
    write_rank_files,
)
from dist_ckpt.core.storage import Storage
from dist_ckpt.errors import CheckpointError, CorruptError
from dist_ckpt.reports import IoCount

_log = logging.getLogger("dist_ckpt")

# The most checkpoints that share a file. Backups count.
MAX_SHARED = 8

# How many saves to remember. A link needs two, and a process may save eight states in turn.
_REMEMBERED = 2 * 8

# A linked file is read back from the disk, completely, once in this many saves.
READ_BACK_EVERY = 8


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """A rank's linkable files in the folder of a save, by name.

    `last_read_back` has the number of the save that last read back a file.
    """

    folder: str
    files: Mapping[str, FileReceipt]
    last_read_back: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None

    def find_last_read_back(self, name: str, save: int) -> int:
        """Return the number of the save that last read back a file; of `save` if it is due."""
        last = self.last_read_back.get(name)
        return save if last is None or save - last >= READ_BACK_EVERY else last


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files that a rank has written or linked. `linked` counts the linked files.

    `damaged` has the errors of earlier files that could not be linked.
    """

    receipts: tuple[FileReceipt, ...]
    linked: IoCount
    saved: SavedFiles
    damaged: tuple[CorruptError, ...]


@dataclass(frozen=True, slots=True)
class LinkableSaves:
    """The last committed saves of a process, the oldest first. `number` counts all its saves.

    `find_damage` gets a folder and a step. Files of a damaged save are not linked.
    """

    saves: tuple[SavedFiles, ...] = ()
    number: int = 0
    find_damage: Callable[[str, int | None], str] = lambda folder, step: ""

    def names(self) -> set[str]:
        """Return the names of files that at least two saves have: only these may be linked."""
        seen = Counter(name for saved in self.saves for name in saved.files)
        return {name for name, count in seen.items() if count > 1}

    def plus(self, saved: SavedFiles) -> LinkableSaves:
        """Return the saves and one more, which was committed."""
        saves = (*self.saves, saved)[-_REMEMBERED:] if saved.files else self.saves
        return LinkableSaves(saves, self.number + 1)


def write_or_link(
    storage: Storage,
    folder: str,
    files: RankFiles,
    earlier: LinkableSaves,
    *,
    threads: int,
    buffers: BufferPool | None = None,
) -> WrittenFiles:
    """Write a rank's files as `write_rank_files` does, but link those that an earlier save has."""
    linkable = {plan.name for plan in files.plans if plan.is_linkable}
    expected: tuple[FileReceipt, ...] = ()
    if candidates := linkable & earlier.names():
        # `NullStorage` writes nothing: these are the receipts of the live tensors.
        selected = _select_files(files, candidates)
        expected = write_rank_files(NullStorage(), "", selected, threads=threads, buffers=buffers)
    # One file after another: all threads work on the same file when it is read back.
    results = {
        receipt.name: _link_file(storage, folder, receipt, earlier, threads) for receipt in expected
    }
    last_read_back = {name: save for name, save in results.items() if isinstance(save, int)}
    linked = tuple(receipt for receipt in expected if receipt.name in last_read_back)
    not_linked = {plan.name for plan in files.plans} - last_read_back.keys()
    remaining = replace(_select_files(files, not_linked), objects=files.objects)
    written = write_rank_files(storage, folder, remaining, threads=threads, buffers=buffers)
    if linked and not written:
        sync_names(storage, folder)
    receipts = (*linked, *written)
    saved = {receipt.name: receipt for receipt in receipts if receipt.name in linkable}
    return WrittenFiles(
        receipts,
        IoCount(len(linked), sum(receipt.nbytes for receipt in linked)),
        SavedFiles(folder, saved, last_read_back, files.step),
        tuple(error for error in results.values() if isinstance(error, CorruptError)),
    )


def _select_files(files: RankFiles, names: Set[str]) -> RankFiles:
    numbers = [n for n, plan in enumerate(files.plans) if plan.name in names]
    return replace(
        files,
        plans=tuple(files.plans[n] for n in numbers),
        readers=tuple(files.readers[n] for n in numbers),
        objects={},
    )


def _link_file(
    storage: Storage, folder: str, wanted: FileReceipt, earlier: LinkableSaves, threads: int
) -> int | CorruptError | None:
    """Link a file of an earlier save; return the number of the save that last read it back.

    If the file must be written again, nothing is linked. Then return the error if the earlier file
    is damaged, else None.
    """
    from dist_ckpt.core.shard_io.write.copy_files import check_file, try_link  # noqa: PLC0415  (a writer starts without)

    name = wanted.name
    candidates = [saved for saved in earlier.saves if saved.files.get(name) == wanted][-2:]
    if len(candidates) < 2:  # the first two saves write their files
        return None
    for saved in candidates:
        path = f"{saved.folder}/{name}"
        try:
            with closing(storage.open(path)) as file:
                if file.num_links >= MAX_SHARED:
                    return None
                last_read_back = saved.find_last_read_back(name, earlier.number)
                is_due = last_read_back == earlier.number
                check_file(file, path, wanted, read_back=is_due, threads=threads)
            if earlier.find_damage(saved.folder, saved.step):
                _log.warning("%s is written again, as its checkpoint is recorded as damaged", path)
                return None
        except FileNotFoundError:  # the older save was pruned: try the newer one
            continue
        except CheckpointError as error:
            _log.warning("%s is not linked but written again: %s", path, error)
            return error if isinstance(error, CorruptError) else None
        return last_read_back if try_link(storage, path, f"{folder}/{name}") else None
    return None
