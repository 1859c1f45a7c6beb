"""Alterations of the hidden state, and the paired statistics that count their effects."""
