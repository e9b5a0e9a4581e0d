"""Look at checkpoints and compare them; without torch."""
