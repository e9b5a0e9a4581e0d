"""One rank reads the blocks that several ranks need, and sends them.

- Which blocks are shared, and who reads them: `core/planning/load/read_sharing.py`.
- What the ranks tell each other before: `block_requests.py`. Which ranks can share: `group.py`.
- The reads of one rank: `shared_work.py`. Their execution, in threads: `shared_reader.py`.
- A shared read for callers with their own plan, such as DCP: `collective_reader.py`.
"""
