"""Files made to do harm: each is refused by a named error, and nothing in it is carried out."""
