"""Convert a model between float32 and float16."""
