"""The writer process: `python -m dist_ckpt.async_save.writer`.

- A new message: a class in `writer_messages.py`, and a case in `_process_message` of
  `background_writer.py`.
- SIGTERM, priority, log, and the end after the trainer's end: `background_writer.py`.
- How one save is claimed, written and committed, and the queue of saves: `writer_saves.py`.
- How the writer waits for staged bytes, and seals a snapshot: `staged_save.py`.
"""
