"""How ranks agree: exchange, liveness, the store of the job, collectives."""
