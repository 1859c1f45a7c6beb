"""Behaviours: clusters of both states and their changes."""
