"""The options of `dc.save`: their checks, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Literal, get_args

import torch

from dist_ckpt import __version__
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit.records.incarnations import Incarnation
from dist_ckpt.core.commit.transaction import IndexFields
from dist_ckpt.core.format.checksums import document_digest
from dist_ckpt.core.format.index.model_description import add_description, check_description
from dist_ckpt.core.format.objects.plain_codec import check_plain, encode_value
from dist_ckpt.core.format.strict_json import Scalar, is_text
from dist_ckpt.core.planning.name_selection import Selection, parse_patterns, parse_selection
from dist_ckpt.core.planning.plan import ReplicaDigests
from dist_ckpt.core.planning.replica_rules import ReplicaRule, parse_replicas
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.core.runtime.arguments import check_flag, check_whole
from dist_ckpt.core.saving.agreement import AgreedPlan, SaveArguments
from dist_ckpt.core.saving.attachments import Attachments, ReadAttachments
from dist_ckpt.core.saving.rank_save import FIRST_NBYTES, RankSave, StateReader
from dist_ckpt.core.saving.replica_copies import apply_replica_rules, average_replicas
from dist_ckpt.core.state.tree.containers import State
from dist_ckpt.reports import LoadReport

# The objects file has the user's metadata. The index has a copy of its short scalars, so that a
# listing reads one document.
MAX_MIRRORED_CHARS = 1024


# "all" compares every byte of replicas; "sample" does so only in the first save of a layout.
CheckReplicas = Literal["sample", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The options of `save`. Call `check` inside an exchange, so that all ranks raise its error.

    Only a run sets the last four fields:

    - `incarnation` is the incarnation of the run: a save of an older incarnation is refused.
    - `boundary` counts the calls of `Checkpointer.step` and `poll`, equal on all ranks.
    - `is_urgent` returns True if a background save must not wait for an earlier save.
    - `make_room` removes old checkpoints. Rank 0 passes the bytes to write, before the claim.
    """

    step: int | None = None
    sharding: ShardingConfig | None = None
    overwrite: bool = False
    metadata: Mapping[str, object] | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    include_frozen: bool = True
    config: Mapping[str, object] | None = None
    kind: str | None = None
    attach: Attachments | ReadAttachments | None = None
    link_unchanged: str | Sequence[str] = ()
    carry_over: LoadReport | None = None
    check_replicas: CheckReplicas = "sample"
    replicas: Mapping[str, ReplicaRule] | None = None
    incarnation: Incarnation | None = None
    boundary: int | None = None
    is_urgent: Callable[[], bool] = lambda: False
    make_room: Callable[[int], None] = lambda nbytes: None

    def check(self) -> None:
        """Raise TypeError or ValueError for options that are not valid."""
        if self.step is not None:
            check_whole("step", self.step, 0)
        if self.sharding is not None and not isinstance(self.sharding, ShardingConfig):
            raise TypeError(f"sharding is a {type(self.sharding).__name__}: give a ShardingConfig")
        check_flag("overwrite", self.overwrite)
        self.selection()
        if self.metadata is not None:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"metadata is a {type(self.metadata).__name__}: give a dict")
            check_plain(dict(self.metadata), "metadata")
        check_description(self.metadata, self.config, self.kind)
        parse_patterns(self.link_unchanged, "link_unchanged")
        if self.check_replicas not in get_args(CheckReplicas):
            raise ValueError(f'check_replicas={self.check_replicas!r}: give "sample" or "all"')
        parse_replicas(self.replicas)

    def all_metadata(self) -> dict[str, object]:
        """Return the metadata with `config` and `kind` in it."""
        return add_description(self.metadata, self.config, self.kind)

    def read_rank(self, session: Session, state: State | StateReader) -> RankSave:
        """Read this rank's state. ValueError or TypeError if it cannot be saved."""
        link_unchanged = parse_patterns(self.link_unchanged, "link_unchanged")
        rank_save = RankSave.read(session, state, self.sharding, self.selection(), link_unchanged)
        rules = parse_replicas(self.replicas)
        if not rules.rules or isinstance(state, StateReader):
            return rank_save
        channel = session.channel
        return rank_save.map_state(
            partial(
                apply_replica_rules, rules=rules, rank=channel.rank, world_size=channel.world_size
            )
        )

    def with_means(self, session: Session, state: State | StateReader) -> State | StateReader:
        """Return the state with the means of replicas, if a rule asks for some. Collective."""
        if not isinstance(self.replicas, Mapping) or "mean" not in self.replicas.values():
            return state

        def read() -> RankSave:
            self.check()
            return self.read_rank(session, state)

        return average_replicas(session, read)

    def selection(self) -> Selection:
        """Return the selection of the names to save. Raises TypeError or ValueError."""
        return parse_selection(self.include, self.exclude, self.include_frozen)

    def index_fields(self) -> IndexFields:
        """Return the fields of the index that follow from these options."""
        return IndexFields(
            step=self.step,
            metadata=_select_scalars(self.all_metadata()),
            saved_by={"dist_ckpt": __version__, "torch": str(torch.__version__)},
        )

    def arguments(self, path: str, attached: Mapping[str, bytes]) -> SaveArguments:
        """Return the arguments of a rank with these options, after `check`."""
        digests = tuple((name, document_digest(data)) for name, data in sorted(attached.items()))
        linked = parse_patterns(self.link_unchanged, "link_unchanged")
        links = f"link_unchanged={[*linked]}" if linked else ""
        texts = (str(self.selection()), links, str(parse_replicas(self.replicas)))
        return SaveArguments(
            step=self.step,
            path=path,
            overwrite=self.overwrite,
            metadata=document_digest(encode_value(self.all_metadata())),
            attached=digests,
            selection=" ".join(filter(None, texts)),
            root="" if self.incarnation is None else self.incarnation.root,
            incarnation_number=0 if self.incarnation is None else self.incarnation.number,
            boundary=self.boundary,
            check_replicas=self.check_replicas,
        )

    def replica_digests(self, rank_save: RankSave, plan: AgreedPlan) -> ReplicaDigests:
        """Return the digests of this rank's replicas. The first save of a plan compares in full."""
        whole_nbytes = FIRST_NBYTES if plan.is_new else 0
        return rank_save.replica_digests(
            plan.save_plan, whole_nbytes=inf if self.check_replicas == "all" else whole_nbytes
        )


def _select_scalars(metadata: Mapping[str, object]) -> dict[str, Scalar]:
    """Return the short scalars of the metadata. JSON has no NaN, so it becomes a string."""
    mirrored: dict[str, Scalar] = {}
    for key, value in metadata.items():
        if type(key) is not str or not is_text(key):
            continue
        if value is None or type(value) is bool or (type(value) is int and abs(value) < 1 << 63):
            mirrored[key] = value
        elif type(value) is float:
            mirrored[key] = value if isfinite(value) else str(value)
        elif type(value) is str and len(value) <= MAX_MIRRORED_CHARS and is_text(value):
            mirrored[key] = value
    return mirrored
