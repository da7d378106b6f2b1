"""The configuration of the documentation site, and an extension for its reference."""
