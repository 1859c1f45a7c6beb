"""Names of the folders that the analyses write to."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class AnalysisFolders:
    """Folders below ``analysis.save_dir``, by what lies in them; names as published."""

    save_dir: Path

    hidden_states = property(lambda self: self.save_dir / "hx_analysis_precomp")
    hidden_state_plots = property(lambda self: self.save_dir / "hx_plots")
    env_states = property(lambda self: self.save_dir / "env_analysis_precomp")
    env_state_plots = property(lambda self: self.save_dir / "env_plots")
    bottleneck = property(lambda self: self.save_dir / "bottleneck_vec_analysis_precomp")
    bottleneck_plots = property(lambda self: self.save_dir / "bottleneck_vec_plots")
    behaviours = property(lambda self: self.save_dir / "combined_agent_env_hx_analysis_precomp")
    behaviour_stability = property(lambda self: self.save_dir / "behaviour_stability")
    behaviour_plots = property(lambda self: self.save_dir / "combined_agent_env_hx_plots")
    jacobians = property(lambda self: self.save_dir / "jacob_analysis_precomp")
    jacobian_plots = property(lambda self: self.save_dir / "jacob_plots")
    correlations = property(lambda self: self.save_dir / "cross_corr_and_causation_plot_data")
    correlation_plots = property(lambda self: self.save_dir / "cross_corr_and_causation_plots")
    comparison = property(lambda self: self.save_dir / "dyn_grad_comparison_data")
    comparison_plots = property(lambda self: self.save_dir / "dyn_grad_comparison_plots")
    stories = property(lambda self: self.save_dir / "causal_stories")
    readout = property(lambda self: self.save_dir / "value_and_action_weights")
    saliency_demonstration = property(lambda self: self.save_dir / "demo_with_without_env_grads")
    loss_over_time = property(lambda self: self.save_dir / "loss_over_time")
    interventions = property(lambda self: self.save_dir / "interventions")
    interventions_in_simulator = property(
        lambda self: self.save_dir / "interventions_in_simulator")
    panel = property(lambda self: self.save_dir / "panel")
