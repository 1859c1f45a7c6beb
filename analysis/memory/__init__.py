"""Studies of the hidden state of a recurrent agent."""
