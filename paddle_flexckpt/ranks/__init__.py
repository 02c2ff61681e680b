"""Ranks: messages between the processes of a job through sockets, without Paddle, and detection of dead ones."""
