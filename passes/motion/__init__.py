"""Passes that move data movement to where it costs less or cancels."""
