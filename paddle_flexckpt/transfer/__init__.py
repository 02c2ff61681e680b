"""The transfer: source shards into targets, as a plan of strided copies carried out from files or peers.

This package does not import Paddle. Ranks agree by the communicator that a caller gives.
"""
