"""Open onnxruntime sessions, diagnose their failures, and measure what operators cost."""

MAX_OPSET = 26
MAX_IR = 13
"""The newest opset and IR version that onnxruntime 1.31 loads."""
