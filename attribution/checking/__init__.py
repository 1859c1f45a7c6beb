"""Validation: scores of features against the game's objects, and checks of attributions."""
