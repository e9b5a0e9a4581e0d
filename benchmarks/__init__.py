"""dist_ckpt beside other libraries and the hardware: `python -m benchmarks`."""
