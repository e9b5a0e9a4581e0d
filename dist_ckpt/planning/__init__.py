"""Who writes and reads which bytes: decided, not done."""
