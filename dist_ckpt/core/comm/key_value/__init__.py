"""The key-value store that ranks agree over, and our own small server."""
