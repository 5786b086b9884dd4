"""Optional bridges to other tools."""
