"""What `dist-ckpt report --json` prints: of a checkpoint, a damaged one, a run."""

from __future__ import annotations

from dist_ckpt.cli.schemas.documents import (
    BOOL,
    FLOAT,
    INT,
    NUMBER,
    PROBLEM,
    TEXT,
    Keys,
    by_name,
    each,
    list_of,
    or_null,
    pairs,
    record,
)

_VERIFICATION = record(
    result={"enum": ["ok", "damaged", "not checked"]},
    level=or_null({"enum": ["full", "quick"]}),
    why=TEXT,
    has_failed=BOOL,
    problems=list_of(PROBLEM),
    num_problems=INT,
    notes=list_of(TEXT),
    nbytes_checked=INT,
)
_OF_RANKS = record(
    components=list_of(
        record(
            name=TEXT,
            by_column=list_of(INT),
            mean_nbytes=FLOAT,
            **each("nbytes num_ranks most_nbytes most_rank", INT),
        )
    ),
    totals=list_of(INT),
    mean_nbytes=FLOAT,
    imbalance=or_null(FLOAT),
    **each("ranks_per_column most_nbytes most_rank least_nbytes num_idle_ranks", INT),
)
_MEASURED = or_null(record(value=NUMBER, step=INT))

# What each document about a checkpoint or a run begins with.
_REPORT = {"path": TEXT, "made_at": FLOAT, "made_by": TEXT}
OF_UNREADABLE: Keys = {
    **_REPORT,
    "about": {"const": "checkpoint"},
    "unreadable": TEXT,
    "metrics": pairs(NUMBER),
    "notes": list_of(TEXT),
    "verification": _VERIFICATION,
}
OF_CHECKPOINT: Keys = {
    **OF_UNREADABLE,
    "unreadable": {"type": "null"},
    "attempt": TEXT,
    "kind": or_null(TEXT),
    "saved_at": FLOAT,
    "config_problem": or_null(TEXT),
    **each("step num_parameters num_trainable", or_null(INT)),
    **each("world_size nbytes tensor_nbytes num_files num_tensors num_tied num_values", INT),
    **each("num_more_components num_more_config num_more_metadata num_more_per_rank", INT),
    **each("saved_by config metadata", pairs(TEXT)),
    **each("mesh attached per_rank", pairs(INT)),
    "tree": list_of(
        record(
            **each("name dtype component", TEXT),
            parent=or_null(INT),
            **each("nbytes num_tensors", INT),
            is_rest=BOOL,
        )
    ),
    "components": list_of(record(name=TEXT, nbytes=INT, num_tensors=INT, dtypes=by_name(INT))),
    "dtypes": list_of(record(name=TEXT, nbytes=INT, num_tensors=INT)),
    "largest": list_of(
        record(name=TEXT, dtype=TEXT, shape=list_of(INT), nbytes=INT, num_shards=INT)
    ),
    "ranks": _OF_RANKS,
}
OF_RUN: Keys = {
    **_REPORT,
    "about": {"const": "run"},
    "check": {"enum": ["none", "quick", "full"]},
    **each("num_checkpoints num_left_out nbytes num_damaged num_more_metrics num_timed", INT),
    "checkpoints": list_of(
        record(
            **each("name state problem result why", TEXT),
            **each("step nbytes world_size num_tensors slowest_rank", or_null(INT)),
            **each("saved_at stalled_s slowest_s", or_null(FLOAT)),
            metrics=by_name(NUMBER),
            **each("protected_by tags", list_of(TEXT)),
            **each("is_pinned is_leased is_verified is_orphaned is_being_replaced", BOOL),
            has_failed=BOOL,
            num_problems=INT,
            seconds=by_name(FLOAT),
        )
    ),
    "incarnations": list_of(
        record(number=INT, at=FLOAT, by=TEXT, restored_step=or_null(INT), why=TEXT)
    ),
    "metrics": list_of(
        record(name=TEXT, num_values=INT, **each("newest lowest highest", _MEASURED))
    ),
    "stalled_s": or_null(FLOAT),
    "longest_stall": or_null(record(step=INT, seconds=FLOAT)),
    "slowest_ranks": list_of(record(rank=INT, num_saves=INT)),
    "history_problem": TEXT,
    "problems": list_of(TEXT),
}

FORMS = (OF_CHECKPOINT, OF_UNREADABLE, OF_RUN)
