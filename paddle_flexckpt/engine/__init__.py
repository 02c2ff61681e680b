"""The transfer: loads and reshards on numpy arrays, and tools that need no Paddle (export, convert, rehearse, verify).

This package uses neither Paddle nor collectives: ``live`` adds live tensors and communication.
"""
