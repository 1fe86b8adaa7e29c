"""CUDA C++ compiled at run time, and its launches. Import nothing but `compile` where CUDA may be absent."""
