"""Train a small GPT and checkpoint it with dist_ckpt: the example to copy from.

    torchrun --nproc-per-node 4 launch/train_gpt.py --root runs/demo --tp 2     # FSDP2 x TP, 2 x 2
    torchrun --nproc-per-node 2 launch/train_gpt.py --root runs/demo            # FSDP2, 2 ranks
    python launch/train_gpt.py --root runs/demo                                 # one process

Each of these goes on from the newest checkpoint of the run under `--root`, whatever number of ranks
wrote it: from memory if it is there still, else from the disk. On SIGTERM or SIGUSR1 to any rank
all of them save, stop and exit with code 75, for "start me again". Everything about checkpoints is
in a few lines of `train`; the rest is an ordinary training script. The text is the source of
Python's standard library, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dist_ckpt as dc

VOCABULARY = 256  # bytes

_log = logging.getLogger(__name__)


# --- the model -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with rotary positions; under TP a rank has some of the heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """The two-layer perceptron of a block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and perceptron, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-6)
        self.ffn = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting `targets`."""
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: Tensor) -> Tensor:
    """Apply rotary position embeddings to (batch, head, position, head_dim)."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


# --- parallelism -----------------------------------------------------------------------------


def shard_over(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the model in place: heads and features over `tp`, then every parameter over `dp`."""
    if mesh["tp"].size() > 1:
        tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Megatron's cut: columns, then rows; between them the sequence is sharded."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": gathered,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "ffn": gathered,
                "ffn.up": ColwiseParallel(),
                "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def world_size() -> int:
    """Return how many ranks the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return which of them this is."""
    return int(os.environ.get("RANK", "0"))


def say(line: str) -> None:
    """Log on rank 0."""
    _log.info("%s", line)


# --- data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """All bytes of the training text; sample number i is the same on every rank and in every run.

    So the data position of the whole job is one number, the count of samples seen, and it means
    the same at any world size.
    """

    data: Tensor
    length: int
    seed: int

    @staticmethod
    def of_standard_library(length: int, seed: int) -> Text:
        """Read the modules of Python's standard library, in the order of their names."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
        return Text(torch.frombuffer(bytearray(data), dtype=torch.uint8), length, seed)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples `first` to `first + count`."""
        room = len(self.data) - self.length - 1
        # multiples of a large prime: spread over the whole text, without a table or a generator
        starts = [
            (self.seed + number) * 2_654_435_761 % room for number in range(first, first + count)
        ]
        rows = torch.stack([self.data[start : start + self.length + 1] for start in starts]).long()
        return rows[:, :-1], rows[:, 1:]


# --- training --------------------------------------------------------------------------------


def train(args: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device) -> int:
    """Train to `args.steps`, saving on the way; return the code to exit with."""
    torch.manual_seed(args.seed)
    model = GPT(args.dim, args.layers, args.heads).to(device)
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    if mesh is not None:
        shard_over(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10))
    text = Text.of_standard_library(args.length, args.seed)

    state: dict[str, Any] = {"samples": 0}
    state |= {"model": model, "optim": optimizer, "scheduler": warmup}
    state["rng"] = dc.RNG(on_reshard="drop")  # other ranks, other random streams
    save = dc.every(steps=args.save_every) | dc.at_end | dc.on_signal("TERM", "USR1")
    is_first = True
    with dc.Checkpointer(args.root, save=save, stop_within_s=args.stop_within) as ck:
        for step in ck.steps(state, until=args.steps):
            if is_first:
                write_digests(args, step - 1, model, optimizer)  # what was loaded
                is_first = False
            started = time.perf_counter()
            inputs, targets = share_of(text.batch(state["samples"], args.batch), mesh, device)
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            state["samples"] += args.batch
            seconds = time.perf_counter() - started
            say(f"step {step:4d}  loss {mean_over_dp(loss, mesh):.4f}  {seconds:.2f} s")
            write_digests(args, step, model, optimizer)  # what is saved next
    return ck.stopped.exit_code if ck.stopped else 0


def share_of(
    batch: tuple[Tensor, Tensor], mesh: DeviceMesh | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the global batch; the ranks of one `tp` group get the same."""
    parts, part = (1, 0) if mesh is None else (mesh["dp"].size(), mesh.get_local_rank("dp"))
    inputs, targets = (rows.chunk(parts)[part].to(device) for rows in batch)
    return inputs, targets


def mean_over_dp(loss: Tensor, mesh: DeviceMesh | None) -> float:
    """Return the loss of the global batch. Every rank calls this."""
    total = loss.detach().clone()
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group("dp"))
        total /= mesh["dp"].size()
    return total.item()


# --- a proof for the quick start: what was saved is what comes back -----------------------------


def write_digests(
    args: argparse.Namespace, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write one line a tensor with the SHA-256 of the whole of it, gathered by torch itself."""
    if args.digest_out is None or step == 0 or step % args.save_every:
        return
    lines = []
    for fqn, tensor in whole_tensors(model, optimizer):
        if rank() == 0:
            data = tensor.cpu().flatten().view(torch.uint8).numpy()
            lines.append(f"{hashlib.sha256(data.data).hexdigest()}  {fqn}\n")
    if rank() == 0:
        Path(args.digest_out).mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08d}-on-{world_size()}-ranks"
        Path(args.digest_out, name).write_text("".join(sorted(lines)))


def whole_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of model and optimizer, whole. Every rank calls this (it gathers)."""
    for fqn, parameter in model.named_parameters():
        tensors = {f"model.{fqn}": parameter.detach()}
        for name, moment in optimizer.state[parameter].items():
            tensors[f"optim.state.model.{fqn}.{name}"] = moment
        for name, tensor in tensors.items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    """Read the command line, join the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", required=True, help="folder of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--stop-within", type=float, default=25, help="seconds, on a signal")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share one block (2: 2 x 2)")
    parser.add_argument("--batch", type=int, default=8, help="samples a step, over all ranks")
    parser.add_argument("--length", type=int, default=64, help="bytes of text in a sample")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digest-out", help="folder for digests of what the steps saved")
    args = parser.parse_args()
    if world_size() % args.tp or args.batch % (world_size() // args.tp):
        parser.error(f"{world_size()} ranks, --tp {args.tp} and --batch {args.batch} do not divide")

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    if device_type == "cuda":
        torch.cuda.set_device(device)
    level = logging.INFO if rank() == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stdout)
    if world_size() == 1:
        sys.exit(train(args, None, device))
    dist.init_process_group()
    mesh = init_device_mesh(
        device_type, (world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    place = ", ".join(f"{axis} {mesh.get_local_rank(axis)}" for axis in ("dp", "tp"))
    print(f"rank {rank()} is process {os.getpid()}: {place}\n", end="", flush=True)
    code = train(args, mesh, device)
    dist.destroy_process_group()
    sys.exit(code)


if __name__ == "__main__":
    main()
