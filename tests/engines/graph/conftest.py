"""Kernels run on a GPU where there is one, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import torch

from tests.interpreter import patch_language_once_per_launch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    patch_language_once_per_launch()
