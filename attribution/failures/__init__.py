"""Causes of failed episodes by counterfactual replay, their rates under interventions, reports."""
