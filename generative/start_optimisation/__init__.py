"""Optimisation of start vectors whose rollouts maximise or minimise a target."""
