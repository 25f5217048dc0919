"""Open onnxruntime sessions, diagnose their failures, and measure what operators cost."""

from toolkit.targets.releases import installed_release

MAX_OPSET = installed_release().max_opset
MAX_IR = installed_release().max_ir
"""The newest opset and IR version that the installed onnxruntime loads."""
