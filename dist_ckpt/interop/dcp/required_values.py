"""Which values of a checkpoint a load may read, as far as that is sure before it is bound."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dist_ckpt.core.loading.load_options import LoadOptions
from dist_ckpt.core.planning.selection import Selection, names_above, selection_of
from dist_ckpt.core.state.binding.sources.rename import Rename, rename_of

# An optimizer is bound by what its groups say, also where a load leaves these out.
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})


@dataclass(frozen=True)
class RequiredValues:
    """Says whether a load into `state` may read the value that was saved under a name.

    It does not if a rename drops it, if nothing at the top of the state has its name, or if that,
    or the value itself, is left out. `path` is what the load is given: a `Source` has options of
    its own, of which nothing is known here.
    """

    state: Mapping[object, object]
    path: object
    options: LoadOptions

    def __call__(self, saved: str) -> bool:
        """Say whether it may be; if unsure, yes."""
        is_sure = isinstance(self.path, str | os.PathLike)
        is_of_optimizer = not _OF_OPTIMIZERS.isdisjoint(saved.split("."))
        if not is_sure or (is_of_optimizer and self.options.rename):
            return True
        name = self._rename.of_all([saved])[0].get(saved, saved)
        if name is None or not self._may_choose(frozenset(names_above(name))):
            return False
        return is_of_optimizer or name in self._not_excluded

    def _may_choose(self, above: frozenset[str]) -> bool:
        """Say whether something may be chosen at or below the top of a name, given all above it."""
        tops = above & self._tops if self._tops else {min(above, key=len)}
        if self._selection.include is not None:
            tops = {top for top in tops if self._selection.may_reach(top)}
        return any(top in self._not_excluded for top in tops)

    @cached_property
    def _tops(self) -> frozenset[str]:
        """What the state has at its top; nothing if all that was saved is taken."""
        return frozenset(map(str, self.state))

    @cached_property
    def _rename(self) -> Rename:
        return rename_of(self.options.rename)

    @cached_property
    def _selection(self) -> Selection:
        return selection_of(self.options.include, self.options.exclude)

    @cached_property
    def _not_excluded(self) -> Selection:
        return Selection(exclude=self._selection.exclude)
