"""Find the layers that can be quantized, and read their weights."""
