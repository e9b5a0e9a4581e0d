"""The command `strip`: drop components from a checkpoint."""

from __future__ import annotations

import click

from dist_ckpt.cli import output, shared_options
from dist_ckpt.cli.shared_options import components_in
from dist_ckpt.core.commit import removal
from dist_ckpt.reports import size
from dist_ckpt.runs.selectors import open_resolved
from dist_ckpt.tools.rewrite.strip import remaining_after, strip_at


@click.command()
@shared_options.path
@click.argument("components", nargs=-1, required=True, shell_complete=components_in)
@shared_options.yes
@shared_options.dry_run
@click.option("--force", is_flag=True, help="Also if it is pinned, tagged or leased.")
@shared_options.json
def strip(
    path: str, components: tuple[str, ...], *, yes: bool, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Drop COMPONENTS, top-level keys of the state, from the checkpoint at PATH.

    There is no way back. The rest stays where it is, with its metrics, tags and pin, and takes no
    new space where the storage makes hard links.

    \b
    dist-ckpt strip runs/a@12000 optim scheduler
    """  # noqa: D301 - click knows the backspace
    storage, where = open_resolved(path)
    removal.check_deletable(storage, where)
    if dry_run:
        num, nbytes = remaining_after(storage, where, frozenset(components), force=force)
        _print_left((where, num, nbytes), None, as_json=as_json)
        return
    if not yes:
        question = f"Drop {', '.join(components)} of {where}?"
        output.confirm(question, f"{where} is not stripped")
    with output.progress("strip") as update:
        report = strip_at(storage, where, frozenset(components), force=force, progress=update)
    left = where, report.num_tensors, report.nbytes
    _print_left(left, report.num_linked, as_json=as_json)


def _print_left(left: tuple[str, int, int], num_linked: int | None, *, as_json: bool) -> None:
    """Print what is left of a checkpoint, or would be if nothing is linked."""
    where, num, nbytes = left
    if as_json:
        facts = {"path": where, "num_tensors": num, "nbytes": nbytes, "num_linked": num_linked}
        output.print_json("strip", {**facts, "dry_run": num_linked is None})
        return
    done = "would be left" if num_linked is None else f"left, {num_linked} files linked"
    click.echo(f"{output.printable(where)}: {num} tensors, {size(nbytes)} {done}")
