"""The run directory: the only interface between training and every reader."""
