"""The command `strip`: remove components from a checkpoint."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.results import StripResult
from dist_ckpt.core.commit import removal
from dist_ckpt.message_text import format_count, format_size
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.rewrite.strip import count_remaining, strip_at


@click.command()
@shared_options.path
@click.argument(
    "components", nargs=-1, required=True, shell_complete=shared_options.complete_components
)
@shared_options.yes
@shared_options.dry_run
@click.option("--force", is_flag=True, help="Strip it even if it is pinned, tagged or leased.")
@shared_options.json
def strip(
    path: str, components: tuple[str, ...], *, yes: bool, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Remove COMPONENTS, top-level keys of the state, from the checkpoint at PATH.

    This cannot be undone. The other components stay at PATH, with metrics, tags and pin. They take
    no new space if the storage supports hard links.

    \b
    dist-ckpt strip runs/a@12000 optim scheduler
    """
    storage, folder = open_resolved(path)
    removal.check_deletable(storage, folder)
    if dry_run:
        num, nbytes = count_remaining(storage, folder, frozenset(components), force=force)
        num_linked = None
    else:
        if not yes:
            question = f"Remove {', '.join(components)} from {folder}?"
            output.confirm(question, f"{folder} is not stripped")
        with output.progress("strip") as update:
            report = strip_at(storage, folder, frozenset(components), force=force, progress=update)
        num, nbytes, num_linked = report.num_tensors, report.nbytes, report.num_linked
    document = StripResult(
        path=folder, num_tensors=num, nbytes=nbytes, num_linked=num_linked, dry_run=dry_run
    )
    suffix = "would be left" if dry_run else f"left, {format_count(num_linked or 0, 'file')} linked"
    text = f"{folder}: {format_count(num, 'tensor')}, {format_size(nbytes)} {suffix}"
    output.print_result(document, text, as_json=as_json)
