"""Analyse the bottleneck vectors from which simulations start: principal components, clusters and
t-SNE of the encoder's (informed) vectors compared with random ones, and uniformity tests of both.
"""

from __future__ import annotations

from analysis.bottleneck_vectors import BOTTLENECK, compute
from analysis.state_maps import precompute_script
from generative.flags import add_random_samples_flag

parser, main = precompute_script(__doc__, BOTTLENECK, compute, add_random_samples_flag)

if __name__ == "__main__":
    raise SystemExit(main())
