"""Analyse how the agent's independent components depend on earlier states of agent and environment:
principal components, clusters and t-SNE of the gradients from saliency_experiments.py."""

from __future__ import annotations

from analysis.jacobians import JACOBIANS, add_gradient_flags, compute
from analysis.state_maps import precompute_script

parser, main = precompute_script(__doc__, JACOBIANS, compute, add_gradient_flags)

if __name__ == "__main__":
    raise SystemExit(main())
