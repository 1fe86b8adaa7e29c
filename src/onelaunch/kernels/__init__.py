"""Kernels, in Triton and CUDA C++, and their launchers: tensors in, tensors out, no autograd. Importing a file here imports Triton."""
