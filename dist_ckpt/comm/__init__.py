"""How ranks agree: exchanges with deadlines, who is alive, bulk collectives.

- `exchange.py` is the protocol `Channel`, and how an error gets to all ranks. Over the job's store:
  `store_exchange.py`, with the coordinator's side and the others' in `exchange_roles.py`.
- Who is dead or silent: `peers.py` decides it, from what `heartbeat.py` tells. Who never came:
  `control.py`, which also makes the sentence; the remedy in it is a `Wording`, of the job's store
  or of the writers'. The deadlines are options, in `dist_ckpt.config`.
- `store_thread.py` talks to a store; `key_server.py` and `key_client.py` are one of our own, for
  writers, whose trainers' store may be gone.
- `collective.py` and `gloo.py` move what is too long for that, `host_links.py` within a host.
- `session.py` keeps all of it for a group; `process_group.py` makes it for torch's groups.
"""
