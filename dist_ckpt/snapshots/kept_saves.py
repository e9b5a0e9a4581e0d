"""What is left in the arenas of this host, as saves: which ranks' parts of each are here, whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from dist_ckpt.snapshots.details import Details, decode_details
from dist_ckpt.snapshots.job_folder import RankFolder
from dist_ckpt.snapshots.kept_snapshots import KeptSnapshot, kept_in


@dataclass(frozen=True, slots=True, eq=False)
class KeptSave:
    """One save of a job. `sealed` are the ranks whose part is here, with digests and headers.

    `attempt` is the one that they were written into, `UNCLAIMED` if the writers here knew of none;
    None if nothing of it is sealed here. `overwrite`: it was to replace a checkpoint at its path.
    `was_committed` says that it became a checkpoint, which may have been deleted since. The
    digests tell whether the bytes are still what was saved: nobody has looked yet.
    """

    id: str
    path: str
    step: int | None
    world_size: int
    began_at: float
    overwrite: bool
    attempt: str | None = None
    was_committed: bool = False
    sealed: Mapping[int, KeptSnapshot] = field(default_factory=dict)

    def details(self, rank: int) -> Details:
        """Return what a rank's snapshot says of the save."""
        return decode_details(self.sealed[rank].snapshot.details)


@dataclass(frozen=True, slots=True)
class KeptSaves:
    """The saves that are kept on this host, by their ids, and what is wrong with other arenas.

    What is wrong is left as it is: it may be another's, or a newer version's.
    """

    saves: Mapping[str, KeptSave]
    problems: tuple[str, ...]


@contextmanager
def kept_saves(folders: Iterable[RankFolder]) -> Iterator[KeptSaves]:
    """Give the saves that the arenas of some ranks hold; they can be read until the block ends."""
    saves: dict[str, KeptSave] = {}
    problems: list[str] = []
    with ExitStack() as stack:
        for folder in folders:
            found, wrong = stack.enter_context(kept_in(folder))
            problems += wrong
            for kept in found:
                try:
                    _add(saves, kept, folder.rank)
                except ValueError as error:
                    problems.append(f"{kept.place}: {error}")
        yield KeptSaves(saves, tuple(problems))


def _add(saves: dict[str, KeptSave], kept: KeptSnapshot, rank: int) -> None:
    """Add a rank's part to its save. ValueError if it does not belong there."""
    snapshot, seal = kept.snapshot, kept.seal
    if snapshot.rank != rank:
        raise ValueError(f"a snapshot of rank {snapshot.rank} lies where those of {rank} do")
    details = decode_details(snapshot.details)
    save = KeptSave(
        *(snapshot.id, snapshot.path, snapshot.step, snapshot.world_size),
        began_at=details.began_at,
        overwrite=details.overwrite,
    )
    there = saves.get(snapshot.id, save)
    if _said(there) != _said(save):
        raise ValueError(f"snapshot {snapshot.id} is of another save on another rank")
    if seal is None:
        saves[snapshot.id] = there
        return
    sizes = {image.name: image.nbytes for image in snapshot.images}
    if {name: nbytes for name, nbytes, _, _ in seal.files} != sizes:
        raise ValueError(f"snapshot {snapshot.id} is sealed with other files than it has")
    if there.attempt and seal.attempt and there.attempt != seal.attempt:
        raise ValueError(f"snapshot {snapshot.id} is sealed as {seal.attempt}, and as another")
    saves[snapshot.id] = replace(
        there,
        attempt=there.attempt or seal.attempt,
        was_committed=there.was_committed or kept.is_committed,
        sealed={**there.sealed, rank: kept},
    )


def _said(save: KeptSave) -> tuple[object, ...]:
    return save.id, save.path, save.step, save.world_size, save.began_at, save.overwrite
