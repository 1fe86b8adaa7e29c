"""The resident engine: a whole training run in one persistent kernel on a CUDA device."""
