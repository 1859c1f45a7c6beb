"""Draw the results of combined_agent_env_hx_analysis_precompute.py: maps of all behaviours, and
the frames, actions and values of each behaviour's samples."""

from __future__ import annotations

from analysis.behaviours import BEHAVIOURS, draw_figures
from analysis.state_maps import plotting_script

parser, main = plotting_script(__doc__, BEHAVIOURS, draw_figures)

if __name__ == "__main__":
    raise SystemExit(main())
