"""Validation: scores of features as detectors of objects, and checks of attributions."""
