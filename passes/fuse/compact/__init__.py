"""Rewrite a model in fewer operators, for targets without a cost table."""
