"""Edits of an agent that take features out of a layer: made of directions, put into weights, and
random ones of the same size."""
