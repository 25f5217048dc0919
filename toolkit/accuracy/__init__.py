"""Accuracy: how far a quantized model is from its float original, and how far it may be."""
