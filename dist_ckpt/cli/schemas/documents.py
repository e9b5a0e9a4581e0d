"""What the documents that `--json` prints look like, as JSON Schemas: `dist-ckpt schema NAME`.

No object has keys beyond those that are named here, but for those that users name. A document's
`schema` is `dist-ckpt.<name>/<version>`; the version grows when a key changes its meaning or goes.
"""

from __future__ import annotations

from collections.abc import Mapping

Schema = Mapping[str, object]
Keys = Mapping[str, Schema]

TEXT: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
FLOAT: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
# JSON has no nan and no infinities: these are texts.
NUMBER: Schema = {"anyOf": [FLOAT, {"enum": ["nan", "inf", "-inf"]}]}
ANY: Schema = {}


def or_null(schema: Schema) -> Schema:
    """Return what may be null as well."""
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Schema) -> Schema:
    """Return a list of so many of it as there are."""
    return {"type": "array", "items": schema}


def by_name(schema: Schema) -> Schema:
    """Return an object whose keys are names that users give."""
    return {"type": "object", "additionalProperties": schema}


def record(**keys: Schema) -> Schema:
    """Return an object that has these keys, all of them and no others."""
    return {
        "type": "object",
        "properties": keys,
        "required": [*keys],
        "additionalProperties": False,
    }


def each(names: str, schema: Schema) -> dict[str, Schema]:
    """Return keys that hold the same."""
    return dict.fromkeys(names.split(), schema)


def pairs(schema: Schema) -> Schema:
    """Return what lists names, each with something: in their order, which JSON's objects lack."""
    both = [TEXT, schema]
    return list_of({"type": "array", "prefixItems": both, "minItems": 2, "maxItems": 2})


_LISTED = record(
    name=TEXT,
    path=TEXT,
    state={"enum": ["committed", "open", "abandoned", "damaged", "incompatible"]},
    step=or_null(INT),
    nbytes=or_null(INT),
    world_size=or_null(INT),
    num_tensors=or_null(INT),
    saved_at=or_null(FLOAT),
    metadata=or_null(by_name(ANY)),
    problem=or_null(TEXT),
    attempt=or_null(TEXT),
    save_id=or_null(TEXT),
    metrics=by_name(NUMBER),
    tags=list_of(TEXT),
    pin=or_null(TEXT),
    leases=list_of(TEXT),
    protected_by=list_of(TEXT),
    is_verified=BOOL,
    is_orphaned=BOOL,
    is_being_replaced=BOOL,
)

PROBLEM = record(
    file=TEXT,
    rank=or_null(INT),
    tensor=or_null(TEXT),
    rows=or_null(list_of(INT)),
    what=TEXT,
)
_VERIFIED: Keys = {
    "path": TEXT,
    "level": {"enum": ["full", "quick"]},
    "ok": BOOL,
    "num_files": INT,
    "nbytes_checked": INT,
    "problems": list_of(PROBLEM),
    "notes": list_of(TEXT),
}

_PAIR = record(a=TEXT, b=TEXT)

_RUN = record(
    name=TEXT,
    path=TEXT,
    num_checkpoints=INT,
    newest=or_null(TEXT),
    step=or_null(INT),
    kind=or_null(TEXT),
    num_parameters=or_null(INT),
    num_trainable=or_null(INT),
    config=ANY,
    best=or_null(NUMBER),
    best_step=or_null(INT),
    best_path=or_null(TEXT),
    metrics=by_name(NUMBER),
    problems=list_of(TEXT),
)

_WRITTEN: Keys = {
    **each("path attempt", TEXT),
    "step": or_null(INT),
    **each("nbytes num_tensors num_files num_linked nbytes_linked", INT),
    "seconds": by_name(FLOAT),
}

_SHOWN: Keys = {
    **each("path attempt", TEXT),
    **each("step num_parameters num_trainable", or_null(INT)),
    "kind": or_null(TEXT),
    "config": ANY,
    "saved_at": FLOAT,
    "saved_by": by_name(TEXT),
    **each("world_size nbytes num_tensors num_aliases num_values num_files", INT),
    **each("mesh attached nbytes_by_component nbytes_by_dtype per_rank", by_name(INT)),
    "metadata": by_name(ANY),
}

# Versions of the documents above the first; 0.2.0 has renamed fields in these.
_VERSIONS = {"ls": 2, "watch": 2, "request-save": 2, "report": 2}


def title_of(name: str) -> str:
    """Return the value of `schema` in a document: its name and version."""
    return f"dist-ckpt.{name}/{_VERSIONS.get(name, 1)}"


# By name: the keys of the document besides `schema`.
KEYS: Mapping[str, Keys] = {
    "ls": {"path": TEXT, "checkpoints": list_of(_LISTED), "runs": list_of(TEXT)},
    "show": _SHOWN,
    "show-all": {"checkpoints": list_of(record(**_SHOWN))},
    "tree": {
        "path": TEXT,
        "depth": INT,
        "nodes": list_of(record(name=TEXT, nbytes=INT, tensor=or_null(TEXT))),
    },
    "tensors": {
        "path": TEXT,
        "tensors": list_of(
            record(
                name=TEXT,
                dtype=TEXT,
                shape=list_of(INT),
                nbytes=INT,
                component=TEXT,
                num_shards=INT,
                alias_of=or_null(TEXT),
            )
        ),
    },
    "stats": {
        "path": TEXT,
        "ok": BOOL,
        "tensors": list_of(
            record(
                name=TEXT,
                dtype=TEXT,
                shape=list_of(INT),
                numel=INT,
                min=or_null(NUMBER),
                max=or_null(NUMBER),
                mean=or_null(NUMBER),
                rms=or_null(NUMBER),
                zeros=or_null(INT),
                nan=or_null(INT),
                inf=or_null(INT),
                alias_of=or_null(TEXT),
            )
        ),
    },
    "layout": {
        "path": TEXT,
        "nbytes_by_rank": list_of(INT),
        "imbalance": FLOAT,
        "files": list_of(
            record(
                name=TEXT,
                rank=INT,
                component=TEXT,
                nbytes=INT,
                num_shards=INT,
                shards=list_of(
                    {
                        "anyOf": [
                            record(
                                tensor=TEXT, nbytes=INT, offset=list_of(INT), shape=list_of(INT)
                            ),
                            record(tensor=TEXT, nbytes=INT, start=INT, stop=INT),
                        ]
                    }
                ),
            )
        ),
    },
    "verify": _VERIFIED,
    "verify-all": {
        "path": TEXT,
        "ok": BOOL,
        "checkpoints": list_of(record(**_VERIFIED)),
        "not_checked": list_of(record(path=TEXT, why=TEXT)),
    },
    "compare": {
        "metric": or_null(TEXT),
        "runs": list_of(_RUN),
        "differing": by_name(by_name(TEXT)),
    },
    "diff": {
        "same": BOOL,
        "a": TEXT,
        "b": TEXT,
        "config": by_name(_PAIR),
        "removed": list_of(TEXT),
        "added": list_of(TEXT),
        "changed": by_name(_PAIR),
        "objects": or_null(by_name(_PAIR)),
        "values": or_null(
            list_of(
                record(
                    name=TEXT,
                    num_differing=INT,
                    numel=INT,
                    max_difference=or_null(FLOAT),
                )
            )
        ),
    },
    "estimate": {
        "path": TEXT,
        "folder": TEXT,
        "world_size": INT,
        "nbytes": INT,
        "nbytes_rank": INT,
        "num_files": INT,
        "num_saves": INT,
        "num_kept": INT,
        "num_at_once": INT,
        "nbytes_free": INT,
        "nbytes_peak": INT,
        "rate": or_null(FLOAT),
        "save_s": or_null(FLOAT),
        "fits": BOOL,
    },
    "prune": {
        "root": TEXT,
        "dry_run": BOOL,
        "checkpoints": list_of(
            record(name=TEXT, path=TEXT, step=or_null(INT), kept_by=list_of(TEXT))
        ),
    },
    "pin": {"path": TEXT, "step": INT, "why": TEXT, **each("removed dry_run", BOOL)},
    "tag": {"path": TEXT, "step": INT, "name": TEXT, **each("removed dry_run", BOOL)},
    "upgrade": {
        "root": TEXT,
        "dry_run": BOOL,
        "folders": list_of(TEXT),
        **each("num_annotations num_incarnations", INT),
        "alive": list_of(TEXT),
    },
    "gc": {"path": TEXT, "dry_run": BOOL, "removed": list_of(TEXT)},
    **dict.fromkeys(("reshard", "cp", "average", "import"), _WRITTEN),
    "dry-run": {
        "path": TEXT,
        "nbytes": INT,
        "files": list_of(record(name=TEXT, nbytes=INT)),
        **each("replaces reads", list_of(TEXT)),
    },
    "backup": {"path": TEXT},
    "export": {"path": TEXT, "format": TEXT, "nbytes": INT},
    "strip": {
        "path": TEXT,
        **each("num_tensors nbytes", INT),
        "num_linked": or_null(INT),
        "dry_run": BOOL,
    },
    "rm": {"path": TEXT, "dry_run": BOOL},
    "watch": {
        **each("root problem", TEXT),
        "at": FLOAT,
        "changes": list_of(TEXT),
        **each("incarnation step", or_null(INT)),
        "last_liveness": or_null(FLOAT),
        "checkpoints": list_of(
            record(
                **each("name state", TEXT),
                **each("step nbytes nbytes_written", or_null(INT)),
                saved_at=or_null(FLOAT),
                metrics=by_name(NUMBER),
                is_orphaned=BOOL,
                kept_by=list_of(TEXT),
            )
        ),
    },
    "request-save": {
        **each("root why", TEXT),
        "incarnation": INT,
        **each("stops wait dry_run", BOOL),
        "outcome": {"enum": ["saved", "failed", "ended", None]},
        "step": or_null(INT),
        "attempt": or_null(TEXT),
        "last_liveness": or_null(FLOAT),
    },
}
