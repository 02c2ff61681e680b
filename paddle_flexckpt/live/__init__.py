"""Plans carried out on live tensors: save, load and reshard."""
