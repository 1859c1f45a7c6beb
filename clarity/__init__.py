"""Attribution of an agent's outputs to its layers, and the features those are made of."""
