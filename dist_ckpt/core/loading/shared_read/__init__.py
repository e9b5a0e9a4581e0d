"""One rank reads the blocks that several ranks need, and sends them.

- The blocks that are shared, and the rank that reads each: `core/planning/load/shared_ranges.py`.
- The requests of the ranks, and the ranks that can share: `shared_read_group.py`.
- The reads of one rank, and their execution in threads: `run_shared_read.py`.
- Its callers, also for reads that no rank shares: `read_blocks` in `core/loading/load.py`.
- A shared read for DCP, which has its own plan: `PlannedReads` in `interop/dcp/`.
"""
