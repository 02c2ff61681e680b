"""flexckpt: what can be done with a checkpoint without a cluster. Needs numpy, not Paddle."""
