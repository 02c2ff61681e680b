"""Tests of what the processes of a job tell each other."""
