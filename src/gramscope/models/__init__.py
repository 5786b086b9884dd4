"""Plain networks used by the experiments."""
