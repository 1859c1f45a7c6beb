"""Cross-correlation and cross-causation of independent components, and their agreement."""
