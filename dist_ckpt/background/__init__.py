"""`dc.AsyncSaver`: the trainer's side of background saves, and restore."""
