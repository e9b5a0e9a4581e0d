"""`dc.save`: agree, write, receipts, verdict."""
