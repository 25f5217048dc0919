"""Fold biases, batch normalization and scales into convolutions."""
