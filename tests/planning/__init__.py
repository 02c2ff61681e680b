"""Tests of paddle_flexckpt.planning."""
