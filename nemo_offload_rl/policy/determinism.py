"""Training whose results repeat bit by bit, for comparing runs."""

from __future__ import annotations

import os

import torch


def use_deterministic_algorithms() -> None:
    """From now on, this process computes with operations that repeat bit by bit, where torch has such.

    Others become warnings; a backend may refuse them. Call before the first matrix product: cuBLAS reads its setting
    once. Without it the backward pass of attention and some reductions add up in the order in which the GPU's blocks
    happen to finish
    (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Nothing here reads uninitialized memory; filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
