"""Fakes that keep the contracts, and suites that check them; nothing in the library imports it.

- Check a storage backend: subclass `StorageContract` in `storage_contract.py`.
- A storage in memory, one whose calls fail, one that simulates crashes: `memory_storage.py`,
  `faulty_storage.py`, `crash_storage.py`.
- Ranks that are threads: `run_ranks` in `thread_channel.py`.
"""
