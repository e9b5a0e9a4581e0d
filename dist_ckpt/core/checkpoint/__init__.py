"""An opened checkpoint: look into it, read parts of it, verify it; without torch."""
