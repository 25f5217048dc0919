"""Quality: how far a model's answers are from those of the floats, and how far they may be."""
