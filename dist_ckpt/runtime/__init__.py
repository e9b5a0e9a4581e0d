"""What Python lacks: threads to leave, locks of processes, the collector paused."""
