"""How ranks agree: exchanges with deadlines, failure detection, collectives.

- `comm/exchange/channel.py` is the protocol `Channel`, and how an error gets to all ranks. Over the
  job's store: `comm/exchange/store_channel.py`, with the side of the coordinator and that of the
  participants.
- Who is dead or silent: `comm/liveness/failure_detector.py` decides it, from what
  `comm/liveness/heartbeat.py` tells. Who never came: `comm/exchange/exchange_state.py`, which also
  makes the sentence; the remedy in it is a `StoreErrorTexts`, of the job's store or of the
  writers'. The deadlines are options, in `dist_ckpt.config`.
- `comm/key_value/client_thread.py` talks to a store; `comm/key_value/key_server.py` and
  `comm/key_value/key_client.py` are one of our own, for writers, whose trainers' store may be gone.
- `comm/collectives/collective.py` and `comm/collectives/gloo.py` move what is too long for that,
  `comm/collectives/host_links.py` within a host.
- `session.py` keeps all of it for a group; `process_group.py` makes it for torch's groups.
"""
