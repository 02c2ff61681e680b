"""Benchmarks: ``make bench`` runs all of them, ``python -m benchmarks.NAME`` one. ``harness`` is what they share."""
