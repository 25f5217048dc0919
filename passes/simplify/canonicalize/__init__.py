"""Rewrite equivalent forms into one canonical form."""
