"""What carries tensor bytes and agreements between the ranks of a live job."""
