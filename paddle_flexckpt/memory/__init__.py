"""Live state: its description as a catalog, its tensors, and their bytes on the host and on devices."""
