"""Draw the results of env_h_analysis_precompute.py: the states of the simulated environment."""

from __future__ import annotations

from analysis.env_states import ENV_STATES, add_path_flag, draw_figures
from analysis.state_maps import plotting_script

parser, main = plotting_script(__doc__, ENV_STATES, draw_figures, add_path_flag)

if __name__ == "__main__":
    raise SystemExit(main())
