"""Run passes in order, verify each one, and roll back or bisect the ones that fail."""
