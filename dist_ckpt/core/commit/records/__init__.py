"""Records in a run's root: annotations, protections and leases of checkpoints; incarnations.

- How any record is written and read, and the folders of 0.1.0: `record_store.py`.
- A new kind of protection: its meaning in `protections.py`, its writer in `protection_protocol.py`.
- Leases, which a thread renews: `leases.py`. Fencing and orphans: `incarnations.py`.
"""
