"""The generative simulator: its data set, networks, losses and published files."""
