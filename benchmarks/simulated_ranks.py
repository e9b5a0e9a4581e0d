"""Jobs of thousands of ranks of which one is real: what the others would send is made up.

The inventories are those that `build_inventory` makes of a transformer with AdamW under FSDP2,
HSDP, tensor parallelism and so on; the coordinator that gets them is the real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from dist_ckpt.core.comm.collectives.collective import (
    DistinctPayloads,
    SingleProcessCollective,
    payload_name,
    ranks_by_value,
)
from dist_ckpt.core.comm.exchange.channel import (
    Exchange,
    SingleProcessChannel,
    SingleProcessExchange,
)
from dist_ckpt.core.comm.rank_messages import Envelope, new_nonce, pack, unpack
from dist_ckpt.core.comm.session import Session
from dist_ckpt.core.commit import attempts
from dist_ckpt.core.commit.receipts import file_sizes
from dist_ckpt.core.commit.transaction import IndexFields, RankWriteResult, Transaction
from dist_ckpt.core.format import filenames
from dist_ckpt.core.format.filenames import Attempt
from dist_ckpt.core.format.geometry import Shape
from dist_ckpt.core.format.index.index import Node
from dist_ckpt.core.planning.plan import FileReceipt, Inventory, NameList, SavePlan, TensorEntry
from dist_ckpt.core.planning.save.save_planner import stored_nbytes
from dist_ckpt.core.planning.tensor_views import (
    AxisPlacement,
    Flattened,
    Mesh,
    MeshPlaced,
    Parts,
    ReplicatedAxis,
    ShardedAxis,
    StridedAxis,
    View,
    Whole,
    compute_layout,
)
from dist_ckpt.core.runtime import typed_msgpack
from dist_ckpt.core.saving.agreement import AgreedPlan, SaveAgreement, SaveArguments, agree
from dist_ckpt.core.storage import Entry
from dist_ckpt.testing.memory_storage import MemoryStorage

# Llama 3.1 405B: 126 layers of 9 parameters and 3 more; heads on either side are left out.
_LAYER: Mapping[str, Shape] = {
    "attention.wq.weight": (16384, 16384),
    "attention.wk.weight": (1024, 16384),
    "attention.wv.weight": (1024, 16384),
    "attention.wo.weight": (16384, 16384),
    "feed_forward.w1.weight": (53248, 16384),
    "feed_forward.w3.weight": (53248, 16384),
    "feed_forward.w2.weight": (16384, 53248),
    "attention_norm.weight": (16384,),
    "ffn_norm.weight": (16384,),
}
_CUT_BY_COLUMNS = ("wo.weight", "w2.weight")

# The view of a parameter, given its name and shape; its moments lie as it does.
StorageLocation = Callable[[str, Shape], View]


def parameters(count: int) -> dict[str, Shape]:
    """Return the names and shapes of so many parameters of a large transformer."""
    found: dict[str, Shape] = {"tok_embeddings.weight": (128256, 16384)}
    while len(found) < count:
        layer = (len(found) - 1) // len(_LAYER)
        for name in list(_LAYER)[: count - len(found)]:
            found[f"layers.{layer}.{name}"] = _LAYER[name]
    return found


def training_state(shapes: Mapping[str, Shape], place: StorageLocation) -> Inventory:
    """Return what a rank says of {"model": ..., "optim": AdamW, "rng": dc.RNG(), "step": ...}.

    That is three tensors a parameter that lie as `place` says, and one that every rank has.
    """
    views: dict[View, int] = {}
    model: list[TensorEntry] = []
    optim: list[TensorEntry] = []
    for name, shape in shapes.items():
        view = views.setdefault(place(name, shape), len(views))
        model.append(TensorEntry(f"model.{name}", "float32", shape, view, 0))
    whole = views.setdefault(Whole(), len(views))
    for (name, shape), entry in zip(shapes.items(), model, strict=True):
        fqn = f"optim.state.model.{name}"
        optim += (
            TensorEntry(f"{fqn}.step", "float32", (), whole, 1),
            TensorEntry(f"{fqn}.exp_avg", "float32", shape, entry.view, 1),
            TensorEntry(f"{fqn}.exp_avg_sq", "float32", shape, entry.view, 1),
        )
    parameters = tuple(f"model.{name}" for name in shapes)
    nodes = {
        "": ("model", "optim", "rng", "step"),
        "model": tuple(shapes),
        "optim": ("state", "param_groups"),
        "optim.state": parameters,
        **{f"optim.state.{name}": ("step", "exp_avg", "exp_avg_sq") for name in parameters},
    }
    meshes = [view.mesh for view in views if isinstance(view, MeshPlaced)]
    return Inventory(
        mesh=tuple(zip(meshes[0].names, meshes[0].shape, strict=True)) if meshes else (),
        components=("model", "optim"),
        views=tuple(views),
        tensors=(*model, *optim),
        aliases=(),
        values=("optim.param_groups.0", "step"),
        per_rank=(("rng", None),),
        tree=(
            *(Node(fqn, "dict", keys) for fqn, keys in nodes.items()),
            Node("optim.param_groups", "list", (0,)),
        ),
        name_lists=(NameList("optim.param_groups.0.params", parameters),),
        numpy=(),
        parameters=((0, len(model), True),),
        versions=(("model", '{"": 1}'),),
    )


# --- jobs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """The inventories of all ranks, packed, each with the ranks that send it."""

    world_size: int
    inventories: DistinctPayloads


def alike(world_size: int, inventory: Inventory) -> Job:
    """Return the job of which all ranks say the same."""
    return Job(world_size, ((typed_msgpack.encode(inventory), tuple(range(world_size))),))


def each(world_size: int, inventory_of: Callable[[int], Inventory]) -> Job:
    """Return the job of which each rank says something else, as far as it is something else."""
    inventories = [typed_msgpack.encode(inventory_of(rank)) for rank in range(world_size)]
    ranks = ranks_by_value([payload_name(data) for data in inventories])
    return Job(world_size, tuple((inventories[who[0]], who) for who in ranks.values()))


def on_mesh(names: str, shape: Shape, first: int = 0) -> Mesh:
    """Return a mesh of consecutive ranks."""
    return Mesh(tuple(names.split()), shape, tuple(range(first, first + prod(shape))))


def fsdp(world_size: int, count: int) -> Job:
    """FSDP2: every tensor is cut along dimension 0 over all ranks."""
    view = MeshPlaced(on_mesh("dp", (world_size,)), (ShardedAxis(0),))
    return alike(world_size, training_state(parameters(count), lambda *_: view))


def hsdp(world_size: int, count: int) -> Job:
    """HSDP: replicas of groups of up to 256 ranks that cut every tensor."""
    group = min(256, world_size // 2)
    view = MeshPlaced(
        on_mesh("rep dp", (world_size // group, group)), (ReplicatedAxis(), ShardedAxis(0))
    )
    return alike(world_size, training_state(parameters(count), lambda *_: view))


def fsdp_tp(world_size: int, count: int, tp: int = 8) -> Job:
    """FSDP2 over tensor parallelism: a mesh of two dimensions, with strided shards."""
    mesh = on_mesh("dp tp", (world_size // tp, tp))
    return alike(world_size, training_state(parameters(count), _over_tp(mesh)))


def _over_tp(mesh: Mesh) -> StorageLocation:
    @cache
    def view(placements: tuple[AxisPlacement, ...]) -> View:
        return MeshPlaced(mesh, placements)

    def place(name: str, shape: Shape) -> View:
        if len(shape) == 1:
            return view((ShardedAxis(0), ReplicatedAxis()))
        if name.endswith(_CUT_BY_COLUMNS):
            return view((ShardedAxis(0), ShardedAxis(1)))
        return view((StridedAxis(0, mesh.shape[1]), ShardedAxis(0)))

    return place


def pipeline(world_size: int, count: int, stages: int = 16) -> Job:
    """FSDP2 over tensor and pipeline parallelism: each stage has its own layers."""
    size = world_size // stages
    shapes = list(parameters(count).items())
    inventories = []
    for stage in range(stages):
        mesh = on_mesh("dp tp", (size // 8, 8), stage * size)
        inventory = training_state(dict(shapes[stage::stages]), _over_tp(mesh))
        inventories.append((typed_msgpack.encode(inventory), mesh.ranks))
    return Job(world_size, tuple(inventories))


def replicated(world_size: int, count: int) -> Job:
    """DDP: every rank has everything."""
    return alike(world_size, training_state(parameters(count), lambda *_: Whole()))


def zero(world_size: int, count: int) -> Job:
    """ZeRO: every tensor's elements are cut evenly, in row-major order."""
    view = Flattened(on_mesh("dp", (world_size,)))
    return alike(world_size, training_state(parameters(count), lambda *_: view))


def parts(world_size: int, count: int, *, flat: bool) -> Job:
    """LocalShard or FlatShard: every rank names the parts that it holds, no two the same."""
    shapes = parameters(count)
    mesh = on_mesh("dp", (world_size,))
    cuts = {
        shape: compute_layout(
            Flattened(mesh) if flat else MeshPlaced(mesh, (ShardedAxis(0),)), shape
        )
        for shape in set(shapes.values())
    }

    def inventory_of(rank: int) -> Inventory:
        views = {
            shape: Parts((layout.cell(rank),) if rank < layout.cut.num_cells else ())
            for shape, layout in cuts.items()
        }
        return training_state(shapes, lambda _, shape: views[shape])

    return each(world_size, inventory_of)


# --- the coordinator's surroundings ----------------------------------------------------------


class SimulatedChannel(SingleProcessChannel):
    """The channel of rank 0; what the other ranks put into a phase is given beforehand.

    `seconds` is the CPU time of rank 0 in each phase: its work, decoding what all sent, deciding,
    encoding the answer. `nbytes` is what the largest of all envelopes had.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.others: dict[str, Sequence[object]] = {}
        self.seconds: dict[str, float] = {}
        self.nbytes: dict[str, int] = {}
        self._call = ""

    def enter(self, call: str) -> None:
        """See `Channel.enter`."""
        self._call = call
        self.seconds, self.nbytes = {}, {}

    def exchange(self, phase: str) -> Exchange:
        """See `Channel.exchange`. Ranks of which nothing is given put what rank 0 puts."""
        return _SimulatedExchange(phase, self)

    def envelope(self, phase: str, body: bytes) -> bytes:
        """Return what a rank puts into the store."""
        envelope = Envelope(self._call, phase, "0" * 16, new_nonce(), body, None)
        return typed_msgpack.encode(envelope)


class _SimulatedExchange(SingleProcessExchange):
    def __init__(self, phase: str, channel: SimulatedChannel) -> None:
        super().__init__(phase)
        self._channel = channel
        others = channel.others.get(phase, ())
        self._others = [channel.envelope(phase, pack(message)) for message in others]
        self._nbytes = 0
        self._start = time.process_time()

    def _gathered(self) -> Sequence[bytes]:
        channel = self._channel
        own = channel.envelope(self.phase, *super()._gathered())
        envelopes = [own, *(self._others or [own] * (channel.world_size - 1))]
        self._nbytes = max(map(len, envelopes))
        return [unpack(data, Envelope).body for data in envelopes]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        super().__exit__(kind, error, traceback)
        channel = self._channel
        channel.seconds[self.phase] = time.process_time() - self._start
        channel.nbytes[self.phase] = self._nbytes
        channel.exchanges = channel.exchanges.plus(len(self._answer))


class SimulatedCollective(SingleProcessCollective):
    """The collectives of rank 0 of a job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.world_size = job.world_size
        self._job = job

    def all_gather_distinct(self, body: bytes) -> DistinctPayloads:
        """See `Collective.all_gather_distinct`; tells the ranks apart as the real ones do."""
        self.calls = self.calls.plus(len(body))
        names = [b""] * self.world_size
        for sent, ranks in self._job.inventories:
            name = payload_name(sent)
            for rank in ranks:
                names[rank] = name
        inventories = {who[0]: sent for sent, who in self._job.inventories}
        return tuple((inventories[who[0]], who) for who in ranks_by_value(names).values())


class ListedStorage(MemoryStorage):
    """A storage that lists, in every attempt, files that nobody has written."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: Mapping[str, int] = {}

    def list(self, folder: str, *, follow: bool = True) -> Sequence[Entry]:
        """See `Storage.list`."""
        found = super().list(folder, follow=follow)
        if filenames.parse_attempt(folder.rpartition("/")[2]) is None:
            return found
        return [*found, *(Entry(name, "file", n, 0.0) for name, n in self.listed.items())]


ARGUMENTS = SaveArguments(
    step=1,
    path="/checkpoint",
    overwrite=True,
    metadata="0" * 32,
    attached=(),
    selection="",
    root="",
    incarnation_number=0,
    boundary=None,
)


@dataclass(slots=True)
class _Preparation:
    """What the coordinator has ready."""

    arguments: SaveArguments
    inventory: Inventory
    pattern_problems: tuple[str, ...] = ()

    def accept_plan(self, plan: AgreedPlan) -> None:
        """Do nothing: nothing is written."""


class SimulatedSave:
    """Saves of a job into a storage in memory, as its coordinator sees them.

    The session is kept, so that the second save is one with the same layout again.
    """

    path = ARGUMENTS.path

    def __init__(self, job: Job) -> None:
        self.storage = ListedStorage()
        self.channel = SimulatedChannel(job.world_size)
        self.session = Session(self.channel, SimulatedCollective(job))
        self._own = typed_msgpack.decode(job.inventories[0][0], Inventory)

    def run(self) -> SavePlan:
        """Save once, over what was there, and return the plan."""
        with (
            self.session.operation(f"save to {self.path}"),
            Transaction(self.channel, self.session.settings) as transaction,
        ):
            _, attempt, agreed = agree(
                self.session,
                lambda: _Preparation(ARGUMENTS, self._own),
                lambda *_: transaction.claim(self.storage, self.path, overwrite=True),
                SaveAgreement[Attempt],
            )
            transaction.set_attempt(self.storage, self.path, attempt)
            parts = parts_of(agreed.save_plan)
            own, *others = [one.receipt for one in parts]
            self.storage.listed = file_sizes([own, *others])
            self.channel.others["write"] = others
            transaction.write_and_commit(
                agreed.encoded_catalog, IndexFields(1, {}, {}), lambda _: parts[0]
            )
        return agreed.save_plan

    def index(self) -> bytes:
        """Return the index of the last save."""
        attempt, _ = attempts.find_checkpoint(self.storage, self.path)
        data = self.storage.tree()[f"{self.path}/{attempt}/{filenames.INDEX}"]
        assert data is not None
        return data


def parts_of(plan: SavePlan) -> list[RankWriteResult]:
    """Return what all ranks would have written, with two replica groups and headers of one size."""
    catalog = plan.catalog
    digest, header_nbytes = "0123456789abcdef" * 2, 1 << 17
    files: list[list[FileReceipt]] = [[] for _ in range(catalog.world_size)]
    for (component, rank), nbytes in sorted(stored_nbytes(catalog).items()):
        name = filenames.shard_file(catalog.components[component].stem, rank)
        files[rank].append(FileReceipt(name, header_nbytes + nbytes, header_nbytes, digest))
    files[0].append(FileReceipt(filenames.OBJECTS, 100_000, 0, digest))
    for rank in sorted({rank for keys in catalog.per_rank.values() for _, rank in keys}):
        files[rank].append(FileReceipt(filenames.objects_file(rank), 6000, 0, digest))
    groups = tuple((f"{n:032x}", (("w", digest),)) for n in range(2))
    return [RankWriteResult(tuple(written), groups, 1.0) for written in files]
