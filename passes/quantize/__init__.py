"""Quantization: a plan says which layer computes in which numbers, a pass writes it."""
