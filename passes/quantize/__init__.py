"""Quantization: a plan says which layer computes in which numbers, a pass writes it.

What the pass `quantize` does, in order, and where:

    prepare   other numbers for the same function: `smooth`; on their own `equalize`, `clip`
    plan      what can be quantized, and how: `make_plan` of `dynamic`, `static`, `weight_only`
    choose    what of that pays, and leaves the model its answers: `survey`, `search`, `groups`
    write     what is left of the plan: `apply_all` of `trials`, which the choice is made with too
    correct   what int8 shifts on average is taken back: `correct`

A plan (`plan`, as a file `plan_json`) is all that goes from one step to the next. A user can have
it written, edit it, and feed it back; `quantize-dynamic`, `quantize-static` and `quantize-weights`
plan and write alone. The rooms, each with what it is asked for first:

    the passes           auto (`quantize`), dynamic, static, weight_only, smooth, equalize, clip,
                         correct; what they share: options, obstacles, troubles
    layers with weights  layers (linear ones, tables), recurrent, weighted (all of a model)
    integers             arithmetic (scales of channels), blocks (scales of blocks), large (in
                         pieces, where they lie)
    dynamic              writing, dynamic_conv (convolutions, where asked for)
    static               static_sites (what has a kernel), static_region (what is so together),
                         static_ranges, static_ties and static_useful (of activations),
                         static_weights, static_apply (a plan, by static_qdq or static_qop),
                         static_fence (what the runtime must not undo); pointwise and channels_last
                         (convolutions that are products of matrices); saturation (without VNNI)
    weights alone        methods (which codes: rounding, hqq, gptq with gram and triangular),
                         streaming, packing, nbits (written)
    the choice           costs (of a node, by int8_kernels as measured), sizes, regions (the least
                         time, by a minimum cut), survey (a model as such a problem), trials
                         (drafts, judged and timed), harm, search, groups, observing (which ranges
                         make less noise), islands, telling (what came of it)
    factors by channel   kernels (weights by inputs and outputs), passing (which operators let a
                         factor through), channels (how far it goes), scaling, samples,
                         smooth_trial
    means and biases     means, biases, walk (a model run layer by layer), outputs
"""
