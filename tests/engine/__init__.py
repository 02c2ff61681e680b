"""Tests of the runtime: tensors, states, policies, carriers and communicators."""
