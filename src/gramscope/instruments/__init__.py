"""Functions that run a user's model, collect numbers and hand them to the measures."""
