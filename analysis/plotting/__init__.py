"""Figures that several analyses have."""
