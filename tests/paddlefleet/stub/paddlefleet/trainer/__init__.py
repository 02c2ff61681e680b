"""Imitated."""
