"""Tests of paddle_flexckpt.catalog."""
