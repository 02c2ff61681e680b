"""Tests that run with every supported release of Paddle, in one process."""
