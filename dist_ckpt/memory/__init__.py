"""Where bytes come from and go to: host, torch, CUDA, shared."""
