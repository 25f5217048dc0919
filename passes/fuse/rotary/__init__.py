"""Fuse rotary position embeddings."""
