"""What the bytes on disk mean; pure."""
