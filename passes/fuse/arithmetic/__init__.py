"""Fuse and fold chains of elementwise arithmetic."""
