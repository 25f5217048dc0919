"""Fuse scaled dot-product attention."""
