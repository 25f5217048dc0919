"""Calibration: readers of samples, statistics of tensors, and the collector that connects them."""
