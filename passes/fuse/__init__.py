"""Raise: find the meaning of what exporters spelled out, one file an idea."""
