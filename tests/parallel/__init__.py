"""Tests of the mixins, in one process."""
