"""The agent's hidden states in recorded episodes."""
