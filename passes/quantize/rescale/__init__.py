"""Channel rescaling: an equivalent model whose weights and activations quantize better.

One layer is divided by a factor per channel, and the layers that use it are multiplied by it.

    smooth, equalize   the passes: from activations to weights, and between weights
    propagate          the layers that a factor reaches; `channel_flow`: its path through operators
    apply              scaling of the constants of all these layers
    samples            calibration data of a layer's input, and tests of factors on it
"""
