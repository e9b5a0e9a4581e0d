"""What a load takes of each of several sources, by name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dist_ckpt.core.format.index.index import Catalog
from dist_ckpt.core.planning.selection import Selection

_TAG = "source "


def tagged(number: int, fqn: str) -> str:
    """Return what a name of one of several checkpoints is called among those of all."""
    return f"{_TAG}{number}: {fqn}"


def untagged(name: str) -> tuple[int, str]:
    """Return the number of the checkpoint, and the name there."""
    number, _, fqn = name[len(_TAG) :].partition(": ")
    return int(number), fqn


@dataclass(frozen=True, slots=True)
class SourceCatalog:
    """One of several checkpoints that a load takes something from."""

    path: str
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Scope:
    """What a load takes of one source: what is saved at and below `key`, as far as selected.

    `key` is "" where that is everything; `path` is the source's, for messages.
    """

    path: str
    key: str
    selection: Selection

    def holds(self, name: str) -> bool:
        """Say whether a name lies at or below the key."""
        return not self.key or name == self.key or name.startswith(f"{self.key}.")

    def gives(self, name: str) -> bool:
        """Say whether a saved name is taken from this source."""
        return self.holds(name) and name in self.selection

    def is_about(self, name: str) -> bool:
        """Say whether what the state has at a name, or below it, may come from this source."""
        return self.holds(name) or self.key.startswith(f"{name}.")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The names that a load from several sources is about, in place of a `Selection`.

    `asked` is the selection of the load itself. A name is left out if it leaves it out, or if all
    sources do that are about it. What no source is about is not left out: it is missing.
    """

    asked: Selection
    scopes: Sequence[Scope]

    def __contains__(self, name: str) -> bool:
        if name not in self.asked:
            return False
        about = [scope for scope in self.scopes if scope.is_about(name)]
        return not about or any(name in scope.selection for scope in about)

    def unmatched(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the problem of each pattern of the load itself that matches no name."""
        return self.asked.unmatched(names)

    def looked_in(self, name: str) -> tuple[str, ...]:
        """Return the paths of the sources that are about a name, and do not leave it out."""
        about = (scope for scope in self.scopes if scope.is_about(name) and name in scope.selection)
        return tuple(dict.fromkeys(scope.path for scope in about))
