"""Cross-correlation, cross-causation, and where the two agree."""
