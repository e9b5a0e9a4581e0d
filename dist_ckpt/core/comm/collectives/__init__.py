"""Bulk collectives, for data that is too large for the control channel.

- Another transport than gloo: a class like `GlooCollective` in `gloo.py`, with the protocol
  `Collective` of `collective.py`; `core/comm/process_group.py` creates it.
- Shared memory between the ranks of a host: `host_links.py`.
"""
