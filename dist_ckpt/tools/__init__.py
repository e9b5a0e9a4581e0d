"""One process works on whole checkpoints: inspect, rewrite, average, report."""
