"""Short programs to start from, each for a model that somebody else wrote."""
