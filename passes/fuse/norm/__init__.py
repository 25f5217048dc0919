"""Fuse normalizations."""
