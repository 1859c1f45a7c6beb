"""The simulator: its data set, networks, losses, training, files, sampling, saliency, evaluation,
and the search for start vectors."""

import common  # noqa: F401  selects matplotlib's backend before it is imported here
