"""Check that a model is valid and computes what it did before, within a tolerance."""
