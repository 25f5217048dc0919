"""Export transformers checkpoints, by task."""
