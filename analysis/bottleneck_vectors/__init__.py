"""The vectors that simulations start from."""
