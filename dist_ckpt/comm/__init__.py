"""How ranks agree: exchanges with deadlines, who is alive, bulk collectives."""
