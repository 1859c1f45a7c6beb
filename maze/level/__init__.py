"""Levels of maze: state, squares, edits."""
