"""Read, write, verify and repair checkpoints in the format of docs/format.md. Knows no other format."""
