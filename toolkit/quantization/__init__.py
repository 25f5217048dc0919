"""Quantization as data: the plan, number formats, and the parameters of tensors."""
