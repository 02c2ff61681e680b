"""A save of live state: described, agreed, planned, written, committed."""
