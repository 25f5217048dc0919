"""Choose the form of a computation that costs least on the target."""
