"""Dynamic int8: activations are quantized while the model runs."""
