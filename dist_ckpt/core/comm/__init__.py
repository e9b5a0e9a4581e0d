"""How ranks agree: exchanges with deadlines, failure detection, collectives.

- `exchange/channel.py` has the protocol `Channel`, and how an error reaches all ranks;
  `exchange/store_channel.py` implements it over the job's store.
- `exchange/exchange_state.py` detects ranks that are dead, silent or never came, and makes the
  error. The remedy in it is a `StoreErrorTexts`. The deadlines are options, in `dist_ckpt.config`.
- `key_value/client_thread.py` talks to a store. `key_value/key_server.py` is our own server, for
  writer processes: the trainers' store may be gone.
- `collectives/collective.py` and `collectives/gloo.py` move large data between ranks;
  `collectives/host_links.py` moves it within a host.
- `session.py` keeps all of it for a group; `process_group.py` creates it for torch's groups.
"""
