"""What a run's root records beside its checkpoints, and what keeps and fences them."""
