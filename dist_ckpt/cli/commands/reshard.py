"""The command `reshard`: rewrite a checkpoint for another number of ranks."""

from __future__ import annotations

from typing import Any

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import ReshardResult
from dist_ckpt.core.planning.name_selection import parse_selection
from dist_ckpt.core.planning.sharding_config import ShardingConfig
from dist_ckpt.default_opener import OPENER
from dist_ckpt.tools.rewrite.reshard import plan_rewrite, resolve_sharding


@click.command()
@click.argument("source", type=shared_options.PATH)
@click.argument("target", type=shared_options.PATH)
@click.option("--world-size", type=click.IntRange(min=1), help="The number of ranks to split for.")
@click.option(
    "--sharding",
    type=shared_options.PATH,
    help="Split by a ShardingConfig in a .json or .toml file.",
)
@click.option(
    "--max-memory",
    type=shared_options.Bytes(),
    default="1GiB",
    show_default=True,
    help="Memory for buffers.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at TARGET, which may be SOURCE, once the new one is durable.",
)
@shared_options.selection
@shared_options.dry_run
@shared_options.json
def reshard(  # noqa: PLR0913 - those of dc.reshard
    source: str,
    target: str,
    *,
    world_size: int | None,
    sharding: str | None,
    max_memory: int,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    **selection: Any,
) -> None:
    """Rewrite a checkpoint for another number of ranks.

    A load does not need this: dist_ckpt.load reshards by itself. Use it if many jobs load the same
    layout.

    \b
    dist-ckpt reshard run/step-00001000 run-8 --world-size 8
    dist-ckpt reshard run@latest model --world-size 1 --include model
    """
    if (world_size is None) == (sharding is None):
        raise click.UsageError("give either --world-size or --sharding")
    config = None if sharding is None else ShardingConfig.from_file(sharding)
    config = resolve_sharding(config, world_size, max_memory)
    plan = plan_rewrite(
        OPENER.find(source),
        target,
        config,
        max_memory=max_memory,
        overwrite=overwrite,
        selection=parse_selection(**selection),
    )
    output.write_checkpoint(plan, ReshardResult, dry_run=dry_run, as_json=as_json)
