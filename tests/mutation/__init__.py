"""Mutation testing: small changes to the code, each of which a test has to notice (``make test-mutation``)."""
