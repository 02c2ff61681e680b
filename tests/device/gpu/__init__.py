"""The kit for a GPU machine without a network: what it lacks, and numbered steps that run everything there."""
