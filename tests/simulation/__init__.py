"""The simulated cluster: what it is made of, what it finds, and whether it finds what was put there."""
