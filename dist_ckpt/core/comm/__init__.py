"""How ranks agree: exchanges with deadlines, failure detection, collectives.

- A group's channel, collectives and caches: `session.py`. For torch's groups: `process_group.py`.
- An error that travels between ranks, a heartbeat: `rank_messages.py`.
- Small messages of all ranks: `exchange/`. Large data: `collectives/`. The store: `key_value/`.
"""
