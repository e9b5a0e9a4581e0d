"""Who writes and reads which bytes; pure."""
