"""Weight-only formats: block-wise integers, rounded to nearest or by GPTQ."""
