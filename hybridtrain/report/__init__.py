"""Self-contained pages: figures, tables and text in one file, for a phone and without a network."""
