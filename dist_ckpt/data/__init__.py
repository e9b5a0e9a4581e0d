"""The position of a job in its data: one order and one position for any number of ranks."""
