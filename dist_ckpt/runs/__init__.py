"""The folder of a run: its checkpoints by step, annotations, requests and retention.

A retention rule: a function such as `last` in `retention_policy.py`; its text: `policy_text.py`.
The checkpoints that a prune removes: `prune.py`. A selector such as `@latest`: `selectors.py`; the
words that are selectors: `_SELECTOR` in `core/format/filenames.py`.
A field of a listed checkpoint: `RunCheckpoint` in `listing.py`; its column: `cli/commands/ls.py`.
Metrics and save times of a checkpoint: `metrics.py`.
A method of `dc.Run`: `run.py`. The duration of a lease: `core/commit/records/leases.py`.
Messages of `dist-ckpt watch`: `watch_changes.py`. Requests to save: `save_requests.py`.
"""
