"""Configuration, seeding, the loop, many runs at once, checkpoints."""
