"""The channels by which the ranks of a live job exchange tensor bytes and agreements."""
