"""Saving without stopping: a writer process that shares memory with its training process and does not import Paddle."""
