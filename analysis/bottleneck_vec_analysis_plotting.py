"""Draw the results of bottleneck_vec_analysis_precompute.py: the bottleneck vectors from which
simulations start."""

from __future__ import annotations

from analysis.bottleneck_vectors import BOTTLENECK, draw_figures
from analysis.state_maps import plotting_script

parser, main = plotting_script(__doc__, BOTTLENECK, draw_figures)

if __name__ == "__main__":
    raise SystemExit(main())
