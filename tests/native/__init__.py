"""Tests of the native format: files, commit, reading. None of them needs Paddle."""
