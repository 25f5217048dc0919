"""Fuse activation functions."""
