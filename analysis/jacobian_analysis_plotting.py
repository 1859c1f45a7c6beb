"""Draw the results of jacobian_analysis_precompute.py: gradients of independent components."""

from __future__ import annotations

from analysis.jacobians import JACOBIANS, draw_figures
from analysis.state_maps import plotting_script

parser, main = plotting_script(__doc__, JACOBIANS, draw_figures)

if __name__ == "__main__":
    raise SystemExit(main())
