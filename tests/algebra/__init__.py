"""Tests of paddle_flexckpt.algebra."""
