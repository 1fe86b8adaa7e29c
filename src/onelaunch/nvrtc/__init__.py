"""CUDA C++ compiled at run time, and its launches. Where CUDA may be absent, import only `compile` and `activations`."""
