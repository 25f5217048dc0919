"""Fuse decomposed computations into single operators, one folder per family."""
