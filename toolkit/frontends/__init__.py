"""Export models from PyTorch, transformers, TensorFlow, scikit-learn and others to ONNX."""
