"""What a rank holds: tensors, modules, optimizers, wrappers."""
