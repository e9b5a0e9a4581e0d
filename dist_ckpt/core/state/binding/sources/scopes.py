"""The names that a load takes from each of several sources. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.selection import Selection

_TAG = "source "


def tagged(number: int, fqn: str) -> str:
    """Return the name that an entry of one checkpoint has among those of several."""
    return f"{_TAG}{number}: {fqn}"


def untagged(name: str) -> tuple[int, str]:
    """Return the number of the checkpoint, and the name in it."""
    number, _, fqn = name[len(_TAG) :].partition(": ")
    return int(number), fqn


@dataclass(frozen=True, slots=True)
class SourceCatalog:
    """One of several checkpoints of a load."""

    path: str
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Scope:
    """The saved names that a load takes from one source: selected ones at and below `key`.

    `key` is "" for all names; `path` is the source's, for messages.
    """

    path: str
    key: str
    selection: Selection

    def holds(self, name: str) -> bool:
        """Return True if a name is at or below the key."""
        return not self.key or name == self.key or name.startswith(f"{self.key}.")

    def gives(self, name: str) -> bool:
        """Return True if a saved name is loaded from this source."""
        return self.holds(name) and name in self.selection

    def is_about(self, name: str) -> bool:
        """Return True if a name of the state, or a name below it, may come from this source."""
        return self.holds(name) or self.key.startswith(f"{name}.")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The names of a load from several sources, in place of a `Selection`.

    `selection` is that of the load itself. A name is left out by this selection, or by the
    selections of all sources that may have it. A name that no source may have is missing, not left
    out.
    """

    selection: Selection
    scopes: Sequence[Scope]

    def __contains__(self, name: str) -> bool:
        if name not in self.selection:
            return False
        about = [scope for scope in self.scopes if scope.is_about(name)]
        return not about or any(name in scope.selection for scope in about)

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the problem of each pattern of the load itself that matches no name."""
        return self.selection.unmatched(names)

    def looked_in(self, name: str) -> tuple[str, ...]:
        """Return the paths of the sources that may have a name and do not leave it out."""
        about = (scope for scope in self.scopes if scope.is_about(name) and name in scope.selection)
        return tuple(dict.fromkeys(scope.path for scope in about))
