"""Semi-automatic parallelism in real processes: training, checkpoints and moves between its strategies."""
