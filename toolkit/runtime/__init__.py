"""Open onnxruntime sessions, diagnose their failures, and measure what operators cost."""
