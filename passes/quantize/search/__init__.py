"""The choice: what of a plan pays on the target, and leaves the model its answers.

The table of costs proposes, the model decides: timed on this machine, evaluated by its outputs.

    costs       what a node takes in floats and in int8, by `int8_kernels` as measured (`data`), on
                the `sizes` that samples have
    regions     the least time of all choices, by a minimum cut; `survey` makes a model and its plan
                such a problem, `loose` are layers that no other one is bound to
    trials      plans on drafts of the model: evaluated and timed
    search      the fastest plan that keeps the budget; `harm` is the noise of each entry alone
    keeping     the budget alone, for plans that somebody has decided on
    groups      what of that pays on this machine
    observing   which ranges of activations make the least noise
    telling     what came of it, in a user's words
"""
