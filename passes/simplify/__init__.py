"""Remove, fold, share and canonicalize without changing what the model computes."""
