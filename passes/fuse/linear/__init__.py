"""Merge and reshape matrix products."""
