"""The command `schema`: print the JSON Schema of a document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import click
import msgspec

from dist_ckpt.cli import results
from dist_ckpt.cli.report_results import CheckpointReport, DamagedReport, RunReport

# The types of each document. A report has several forms.
_FORMS: Mapping[str, Sequence[type[results.JsonObject]]] = {
    **{
        results.document_name(type_): (type_,)
        for type_ in vars(results).values()
        if isinstance(type_, type)
        and issubclass(type_, results.JsonObject)
        and type_.__struct_config__.tag
    },
    "report": (CheckpointReport, DamagedReport, RunReport),
}
NAMES = tuple(sorted(_FORMS))


def json_schema(name: str) -> dict[str, object]:
    """Return the JSON Schema of the document `dist-ckpt.<name>/<version>`."""
    forms, definitions = msgspec.json.schema_components(_FORMS[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": results.document_tag(_FORMS[name][0]),
        **(forms[0] if len(forms) == 1 else {"anyOf": forms}),
        "$defs": definitions,
    }


@click.command()
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
def schema(name: str) -> None:
    """Print the JSON Schema of a document that --json prints.

    NAME is a command, or one of dry-run, show-all and verify-all. The field `schema` of a document
    has its name and version, such as dist-ckpt.ls/2.

    \b
    dist-ckpt schema ls
    """
    click.echo(json.dumps(json_schema(name), indent=2))
