"""Where bytes come from and go to: host memory, torch, CUDA, shared memory."""
