"""Bulk collectives: what is too large for the control channel."""
