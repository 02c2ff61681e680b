"""Read the checkpoints and files of other programs, and tell whose a directory is."""
