"""Why episodes fail: causes by counterfactual replay, their rates under interventions, reports."""
