"""Saliency: gradients through the simulator, their files and runs."""
