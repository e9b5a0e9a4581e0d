"""When a checkpoint exists: attempts, claim, commit, removal."""
