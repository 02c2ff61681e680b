"""Tests of asynchronous saves."""
