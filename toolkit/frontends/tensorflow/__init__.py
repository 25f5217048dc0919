"""Export TensorFlow and TFLite models."""
