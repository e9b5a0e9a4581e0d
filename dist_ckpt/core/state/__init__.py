"""The user's objects: how a save reads them, and how a load fills them."""
