"""Mergeable float64 accumulators and their collection over a loader."""
