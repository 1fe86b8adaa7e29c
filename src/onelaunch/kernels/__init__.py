"""Kernels in Triton and CUDA C++, with their launchers: tensors in and out, no autograd. Importing a file imports Triton."""
