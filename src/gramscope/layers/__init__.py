"""Seeing the inputs and gradients of every linear-like layer, in one normal form."""
