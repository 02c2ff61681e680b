"""Plans at work on numpy arrays: what a load fills and computes, piece by piece, and whole tensors without Paddle.

Knows neither Paddle nor how ranks talk to each other: ``live`` puts live tensors and collectives around it.
"""
