"""The data of the interpretability panel."""
