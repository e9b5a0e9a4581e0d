"""`dc.AsyncSaver`: saves in the background, and restores; the trainer's side."""
