"""Tests of the runtime: tensors, states, policies, transports and communicators."""
