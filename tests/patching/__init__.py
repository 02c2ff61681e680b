"""Tests of the patches and of what applies them."""
