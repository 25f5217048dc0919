"""Correct the mean error that quantized weights add to a layer's output."""
