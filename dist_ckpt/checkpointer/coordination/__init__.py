"""How ranks agree on the boundary at which all save."""
