"""Tools on top of the transfer that need no Paddle: convert, export, verify, compare, rehearse."""
