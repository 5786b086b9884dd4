"""Data sets: shipped, generated and downloaded."""
