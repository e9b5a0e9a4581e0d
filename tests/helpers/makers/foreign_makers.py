"""Programs that make the checkpoints of frameworks, with the frameworks themselves.

    python tests/helpers/makers/foreign_makers.py lightning FOLDER

Each writes FOLDER/made, and FOLDER/expected.safetensors: what was live in the framework, by the
names that an import is to give. `KINDS` are the programs, with the number of ranks of each.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

LIBRARIES = {
    "lightning": "lightning",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
}


class Net(nn.Module):
    """Small, odd sizes; a buffer, frozen parameters, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("count", torch.tensor(3))
        self.frozen = nn.Linear(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.inner.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.frozen(self.norm(self.inner(x)) * self.scale.to(x.dtype))
        out: torch.Tensor = self.out(y)
        return out


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, in another order than the module's: those without decay come first."""
    live = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in live if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for name, p in live if p.ndim >= 2], "weight_decay": 0.1},
    ]


def adamw(net: nn.Module) -> torch.optim.AdamW:
    """With two groups."""
    return torch.optim.AdamW(groups_of(net), lr=0.01)


def expect(folder: Path, tensors: Mapping[str, torch.Tensor], **values: Any) -> None:
    """Write what is to come out of an import."""
    from safetensors.torch import save_file

    own = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    save_file(own, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def live_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the model and the optimizer's state by our names."""
    found = {f"model.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optim.state.model.{name}.{key}"] = torch.as_tensor(value)
    return found


def make_lightning(folder: Path) -> None:
    """`Trainer.fit` with a ModelCheckpoint, mixed precision left out: that needs a GPU."""
    import lightning as pl

    class Lit(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 5, where: str = "a") -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.net)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4
    )
    model = Lit()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[pl.pytorch.callbacks.ModelCheckpoint(dirpath=folder / "run", monitor="loss")],
    )
    trainer.fit(model, data)
    (folder / "made").mkdir()
    trainer.save_checkpoint(folder / "made" / "a.ckpt")
    (optimizer,) = trainer.optimizers
    expect(folder, live_state(model, optimizer), epoch=trainer.current_epoch, step=4)


def _accelerated(folder: Path, **options: Any) -> Any:
    from accelerate import Accelerator

    torch.manual_seed(1)
    random.seed(1)
    accelerator = Accelerator(cpu=True, **options)
    net = Net()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4
    )
    net, optimizer, scheduler, data = accelerator.prepare(net, optimizer, scheduler, data)
    for (batch,) in data:
        accelerator.backward(net(batch).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return accelerator, net, optimizer, scheduler


class Counted:
    """What a user registers for checkpointing."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 8}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"seen": 8}


def _make_accelerate(folder: Path, *, safe: bool, shards: int = 0) -> None:
    from accelerate import Accelerator

    accelerator, net, optimizer, _ = _accelerated(folder)
    accelerator.register_for_checkpointing(Counted())
    made = folder / "made"
    accelerator.save_state(str(made), safe_serialization=safe)
    if shards:
        (made / "model.safetensors").unlink(missing_ok=True)
        (made / "pytorch_model.bin").unlink(missing_ok=True)
        assert isinstance(accelerator, Accelerator)
        accelerator.save_model(net, made, max_shard_size=shards, safe_serialization=safe)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        own = accelerator.unwrap_model(net)
        expect(folder, live_state(own, optimizer.optimizer), step=accelerator.save_iteration)


def make_accelerate(folder: Path) -> None:
    """`Accelerator.save_state`, by itself: safetensors."""
    _make_accelerate(folder, safe=True)


def make_accelerate_bin(folder: Path) -> None:
    """With `safe_serialization=False`."""
    _make_accelerate(folder, safe=False)


def make_accelerate_ranks(folder: Path) -> None:
    """Two ranks of DDP: random states of each."""
    _make_accelerate(folder, safe=True)


def make_accelerate_shards(folder: Path) -> None:
    """A model in several safetensors files, with an index."""
    _make_accelerate(folder, safe=True, shards=100)


def make_accelerate_fsdp(folder: Path) -> None:
    """FSDP2 with sharded state dicts: folders of torch.distributed.checkpoint.

    `Accelerator.prepare` wants a GPU for FSDP, so its parts that save are called one by one.
    """
    from accelerate import Accelerator
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    kind = "SHARDED_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    made = folder / "made"
    save_fsdp_model(plugin, accelerator, net, made)
    save_fsdp_optimizer(plugin, accelerator, optimizer, net, made)
    save_accelerator_state(made, [], [], [], [], accelerator.process_index, 0)
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in live_state(net, optimizer).items()
    }
    own = {name.replace("state.model.", "state."): value for name, value in state.items()}
    if accelerator.is_main_process:
        expect(folder, own, step=0)
    accelerator.wait_for_everyone()


def _make_deepspeed(folder: Path, stage: int) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(1)
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = adamw(net)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        config=config,
    )
    for _ in range(3):
        batch = torch.randn(4, 3, dtype=torch.bfloat16)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(folder / "made"), client_state={"seen": 8})
    found = {f"model.{name}": value for name, value in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        if stage:
            master = safe_get_full_fp32_param(parameter)
        elif parameter.requires_grad:
            master = engine.optimizer.get_full_hp_param(parameter)
        else:
            master = None
        frozen = _gathered(parameter, stage) if master is None else None
        found[f"model.{name}"] = master if frozen is None else frozen
        for key in ("exp_avg", "exp_avg_sq") if parameter.requires_grad and stage == 3 else ():
            value = safe_get_full_optimizer_state(parameter, key)
            found[f"optim.state.model.{name}.{key}"] = value
    if engine.global_rank == 0:
        for program in (folder / "made").glob("*.py"):
            program.unlink()  # copies of the library's own
        found |= _converted(folder) if stage < 3 else {}
        expect(folder, found, step=3)
    torch.distributed.barrier()


def _converted(folder: Path) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as DeepSpeed's own converter makes it whole."""
    name = (folder / "made" / "latest").read_text()
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    places = ["--input_folder", str(folder / "made" / name), "--output_folder"]
    target = folder / "universal"
    places += [str(target), "--inject_missing_state"]
    subprocess.run(
        [*program, *places, "--num_extract_workers=1", "--num_merge_workers=1"], check=True
    )
    found = {}
    for file in (target / "zero").glob("*/exp_avg*.pt"):
        state = torch.load(file, weights_only=False)  # noqa: TID251 - just written
        found[f"optim.state.model.{file.parent.name}.{file.stem}"] = state["param"]
    shutil.rmtree(target)
    return found


def _gathered(parameter: torch.Tensor, stage: int) -> torch.Tensor:
    import deepspeed

    if stage < 3:
        return parameter.detach()
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def make_zero1(folder: Path) -> None:
    """ZeRO stage 1."""
    _make_deepspeed(folder, 1)


def make_zero2(folder: Path) -> None:
    """ZeRO stage 2."""
    _make_deepspeed(folder, 2)


def make_zero3(folder: Path) -> None:
    """ZeRO stage 3."""
    _make_deepspeed(folder, 3)


def make_megatron(folder: Path) -> None:
    """`dist_checkpointing.save` of a model and an optimizer of sharded tensors, in torch_dist."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    torch.distributed.init_process_group("gloo")
    # It waits for the GPU before each write, whether there is one or not.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    whole = {"weight": torch.randn(2, 6, 4), "bias": torch.randn(2, 6), "norm": torch.randn(4)}
    moments = {name: torch.rand_like(value) for name, value in whole.items()}

    def cut(name: str, value: torch.Tensor, above: str) -> dict[str, Any]:
        if name == "norm":
            key = f"{above}decoder.final_layernorm.weight"
            return {f"{above}{name}": ShardedTensor.from_rank_offsets(key, value, replica_id=rank)}
        key = f"{above}decoder.layers.{name}"
        half = value.shape[1] // 2
        return {
            f"{above}{name}.{layer}": ShardedTensor.from_rank_offsets(
                key,
                value[layer, rank * half : (rank + 1) * half].contiguous(),
                (0, layer, 2),
                (1, rank, 2),
                prepend_axis_num=1,
            )
            for layer in range(2)
        }

    state: dict[str, Any] = {"iteration": 12, "checkpoint_version": 3.0, "args": {"lr": 0.1}}
    for above, tensors in (("", whole), ("optimizer.state.exp_avg.", moments)):
        for name, value in tensors.items():
            state |= cut(name, value, above)
    state["extra"] = ShardedObject(
        "decoder.layers.extra_state", {"scale": 2.0, "seen": rank}, (2,), (rank,)
    )
    (folder / "made").mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder / "made"))
    names = {"weight": "layers.weight", "bias": "layers.bias", "norm": "final_layernorm.weight"}
    found = {f"model.decoder.{names[n]}": value for n, value in whole.items()}
    found |= {f"optimizer.state.exp_avg.decoder.{names[n]}": v for n, v in moments.items()}
    if not rank:
        expect(folder, found, step=12)


KINDS: Mapping[str, tuple[Callable[[Path], None], int]] = {
    "lightning": (make_lightning, 1),
    "accelerate": (make_accelerate, 1),
    "accelerate-bin": (make_accelerate_bin, 1),
    "accelerate-shards": (make_accelerate_shards, 1),
    "accelerate-ranks": (make_accelerate_ranks, 2),
    "accelerate-fsdp": (make_accelerate_fsdp, 2),
    "deepspeed-zero1": (make_zero1, 2),
    "deepspeed-zero2": (make_zero2, 2),
    "deepspeed-zero3": (make_zero3, 2),
    "megatron": (make_megatron, 2),
}


def run(kind: str, folder: Path) -> None:
    """Make the files of a kind in a new folder, in processes of their own."""
    folder.mkdir(parents=True)
    ranks = KINDS[kind][1]
    program = [__file__, kind, str(folder)]
    if ranks > 1:
        nodes = ["--standalone", f"--nproc-per-node={ranks}"]
        program = ["-m", "torch.distributed.run", *nodes, *program]
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run([sys.executable, *program], check=True, env=env, timeout=300)
    library = LIBRARIES[kind.partition("-")[0]]
    versions = {name: importlib.metadata.version(name) for name in (library, "torch")}
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ or KINDS[sys.argv[1]][1] == 1:
        KINDS[sys.argv[1]][0](Path(sys.argv[2]).absolute())
    else:
        run(sys.argv[1], Path(sys.argv[2]).absolute())
