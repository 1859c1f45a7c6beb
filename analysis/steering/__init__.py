"""Steering vectors from the states of recorded episodes."""
