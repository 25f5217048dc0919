"""Factors by channel: other numbers for the same function, which lose less in 8 bits.

What one layer is divided by, the layers that read it are multiplied by.

    smooth, equalize   the passes: from activations to weights, and from weights to weights
    channels           how far a factor goes; `passing`: which operators let it through
    scaling            a factor taken from one layer and given to the next
    samples            what calibration tells of a layer's input; `smooth_trial` tries factors on it
"""
