"""Numbers from matrices and statistics."""
