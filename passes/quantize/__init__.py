"""Quantization: a plan says which layer computes in which numbers, a pass writes it.

What the pass `quantize` does, in order, and where:

    prepare   other numbers for the same function: `factors.smooth`; on their own
              `factors.equalize`, `clip`
    plan      what can be quantized, and how: `make_plan` of `dynamic`, `static`, `weight_only`
    choose    what of that pays, and leaves the model its answers: `choice`
    write     what is left of the plan: `apply`, which drafts for the choice are made with too
    correct   what int8 shifts on average is taken back: `correct`

A plan (`plan`, as a file `plan_json`) is all that goes from one step to the next. A user can have
it written, edit it, and feed it back; `quantize-dynamic`, `quantize-static` and `quantize-weights`
plan and write alone. The rooms, each with what it is asked for first:

    the passes           auto (`quantize`), dynamic, static/, weight_only/, correct/, clip, and
                         factors/ (`smooth`, `equalize`); what they share: options, obstacles,
                         troubles, apply (a plan, of all schemes)
    layers with weights  layers (linear ones, tables), recurrent, weighted (all of a model),
                         channel_weights (seen by inputs and outputs), stored (in the model),
                         means (of what they read), distinct (their names)
    integers             arithmetic (scales of channels), large (in pieces, where they lie),
                         saturation (without VNNI)
    dynamic              writing, dynamic_conv (convolutions, where asked for)
    static/              by calibrated ranges: Q/DQ pairs, or operators on integers
    weight_only/         4 or 8 bits by blocks: rounding, hqq, gptq
    choice/              costs, regions, trials on drafts, and the search among them
    factors/             factors by channel, moved between layers
    correct/             biases that take back what int8 shifts
"""
