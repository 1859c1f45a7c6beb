"""Causal stories: a page for each behaviour."""
