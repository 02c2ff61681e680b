"""Ranks: what the processes of a job tell each other through sockets, without Paddle, and who of them has gone."""
