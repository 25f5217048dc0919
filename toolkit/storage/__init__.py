"""Weights that stay on disk, and files that are written whole or not at all."""
