"""The trainer's side of one background save.

- What is planned and copied, and what overlaps with training: `background_save.py`.
- A busy rank, or an earlier save that failed: `start_handshake.py`.
- How a writer starts, and what its death means; `SaveHandle`: `writer_handle.py`.
- The resources of a job, and writers that an earlier run left: `job.py`.
"""
