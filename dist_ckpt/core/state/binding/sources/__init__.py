"""What one or several checkpoints offer, under the state's names. Pure."""
