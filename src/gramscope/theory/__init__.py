"""Closed-form early-time predictions; no nn.Module."""
