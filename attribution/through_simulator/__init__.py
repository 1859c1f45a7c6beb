"""Checks of saliency maps through the simulator, beside attributions to layers."""
