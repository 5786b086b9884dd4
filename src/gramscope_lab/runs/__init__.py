"""The run directory: configuration, records, artefacts."""
