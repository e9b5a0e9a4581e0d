"""The control channel: one operation that spreads any rank's error to all."""
