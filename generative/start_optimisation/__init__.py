"""Starts made to order: start vectors whose rollouts maximise or minimise a target."""
