"""What the hidden state of a recurrent agent holds."""
