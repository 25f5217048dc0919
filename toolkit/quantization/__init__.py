"""What a quantization is: the plan, the number formats, and the parameters of tensors."""
