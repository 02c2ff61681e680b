"""Random damage to a checkpoint: it is found, located, and never loaded as if it were data."""
