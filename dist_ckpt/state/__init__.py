"""What a rank holds: tensors, modules, optimizers, and the wrappers around them."""
