"""`dc.load`: open, check, read, place."""
