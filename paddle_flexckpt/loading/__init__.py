"""A load, a reshard and a publication: sources and targets of live ranks around one transfer."""
