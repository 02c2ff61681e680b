"""The matrix: what every strategy saves, every other strategy of the same model loads."""
