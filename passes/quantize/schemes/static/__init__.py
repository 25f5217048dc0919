"""Static int8: calibrated ranges, written as Q/DQ pairs or integer operators."""
