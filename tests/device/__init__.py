"""Tests of the library on a simulated accelerator."""
