"""Resolve If and Loop nodes whose condition or trip count is known."""
