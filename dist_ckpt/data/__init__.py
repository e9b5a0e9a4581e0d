"""Where a job stands in its data: an order and a position in it that any number of ranks share."""
