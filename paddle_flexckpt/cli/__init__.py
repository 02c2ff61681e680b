"""flexckpt: the command line, for work with checkpoints without a cluster. Needs numpy, not Paddle."""
