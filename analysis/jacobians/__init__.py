"""Gradients of independent components, clustered."""
