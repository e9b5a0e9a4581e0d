"""The key-value store that ranks agree over, and our own small server.

- How values, counters and large values are stored: `client_thread.py`.
- A deadline of store calls, the remedies in error messages: `client_thread.py`.
- Our own store, for writer processes after the trainers' store is gone: `key_server.py` and
  `key_client.py`.
"""
