"""The stages of an experiment as jobs of a cluster: what they ask for, submitting, their status."""
