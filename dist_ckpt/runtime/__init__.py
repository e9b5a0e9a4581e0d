"""What Python lacks: threads, locks, the collector paused, measures."""
