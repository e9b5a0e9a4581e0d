"""Bulk collectives, for data that is too large for the control channel."""
