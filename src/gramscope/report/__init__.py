"""Records to figures and HTML."""
