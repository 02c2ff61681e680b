"""Weights that reach an inference engine."""
