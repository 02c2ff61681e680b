"""Read the checkpoints and files of other programs, and find out which program wrote a directory."""
