"""Analyse the states of the simulated environment: principal components, clusters and t-SNE."""

from __future__ import annotations

from analysis.env_states import ENV_STATES, compute
from analysis.state_maps import precompute_script

parser, main = precompute_script(__doc__, ENV_STATES, compute)

if __name__ == "__main__":
    raise SystemExit(main())
