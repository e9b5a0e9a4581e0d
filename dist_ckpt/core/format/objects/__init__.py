"""Objects files: values that are not tensors, as msgpack without code."""
