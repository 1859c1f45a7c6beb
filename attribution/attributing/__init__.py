"""Layers that all information passes through, integrated gradients, features, examples, files."""
