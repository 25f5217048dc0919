"""Third-party optimizers as passes."""
