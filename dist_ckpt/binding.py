"""The loading side of a state: which live memory each saved name goes to.

    survey(state) -> Template           what the state asks for (template.py)
    bind(template, saved) -> Binding    decides by names and kinds; every problem is listed
    binding.wanted -> load plan         all ranks agree that there is no problem
    binding.allocate() -> targets       memory that does not exist yet; the reader fills all
    binding.place(files)                plain values and new tensors go where they belong
    binding.load_objects()              load_state_dict, set_extra_state; generators last

`bind` changes nothing that the user holds, and no optimizer state is made before `allocate`,
which makes memory that `place` hangs in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from dist_ckpt.asks import Asks, Contents, Get
from dist_ckpt.containers import PathKey, container, entries_of, join
from dist_ckpt.index import Key
from dist_ckpt.memory import Target
from dist_ckpt.module_binding import bind_module
from dist_ckpt.objects import ObjectsFile
from dist_ckpt.optimizer_binding import bind_optimizer
from dist_ckpt.plan import Wanted
from dist_ckpt.saved import Saved, saved_of
from dist_ckpt.selection import Selection
from dist_ckpt.state_tree import (
    Branch,
    GroupLeaf,
    ModuleLeaf,
    ObjectLeaf,
    OptimizerLeaf,
    PerRankLeaf,
    PlainLeaf,
    TensorLeaf,
    Tree,
)
from dist_ckpt.template import Template, survey

__all__ = ["Binding", "Template", "bind", "saved_of", "survey", "unexpected_problem"]
