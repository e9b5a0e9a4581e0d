"""The index: the one JSON document that makes a checkpoint."""
