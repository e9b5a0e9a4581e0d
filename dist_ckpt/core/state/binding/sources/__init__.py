"""One or several checkpoints, under the names of the state. Pure."""
