"""The search for the part of a plan that is faster on the target, within the error budget.

The cost table proposes candidates; timing on this machine and accuracy on samples decide.

    costs               times of a node in float and in int8, from the table that `int8_kernels`
                        describes (`data`) and the shapes on a feed (`value_shapes`)
    problem             a model and its plan as a minimum-cut problem (`min_cut`), with
                        `independent_layers` beside it
    candidate_eval      accuracy and time of plans applied to copies of the model
    layer_sensitivity   the noise of each entry alone
    search              the fastest plan within the budget
    enforce_budget      the budget alone, for a user's plan or a single scheme
    range_search        the activation ranges with the least noise
    paired_timing       the time of each group of layers against the float model
    notes               the outcome for the user
"""
