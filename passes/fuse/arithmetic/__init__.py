"""Fuse elementwise arithmetic, reductions, Einsum and one-hot products."""
