"""The transfer: source shards into targets, as a plan of strided copies carried out from files or peers.

This package uses neither Paddle nor collectives: ``memory`` and ``communication`` add live tensors and ranks.
"""
