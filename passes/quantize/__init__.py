"""Quantization: a plan gives each layer a number format, and a scheme writes it.

The pass `quantize` does the following:

    prepare   equivalent weights that quantize better: `rescale.smooth`; as passes of their own
              `rescale.equalize`, `clip_weights`
    plan      what can be quantized, and how: `make_plan` of each scheme
    search    the part that is faster and within the error budget: `search`
    write     the chosen plan: `apply_plan`, which writes candidates of the search as well
    correct   mean errors of the outputs: `bias_correction`

A plan (`toolkit.quantization`) is all that one step hands to the next. A user can write it to a
file, edit it, and feed it back; `quantize-dynamic`, `quantize-static` and `quantize-weights` plan
and write one scheme each. The folders:

    schemes/          dynamic, static (calibrated ranges), weight_only (4 or 8 bits by blocks)
    layers/           layers with constant weights: how to find, quantize and store these
    search/           cost model, candidates and their evaluation
    rescale/          channel factors that move between layers
    bias_correction/  biases that compensate mean errors
"""
