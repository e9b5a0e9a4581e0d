"""What the bytes on disk mean: values, and how they are encoded."""
