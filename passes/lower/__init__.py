"""Choose the candidate of each computation that is fastest on the target."""
