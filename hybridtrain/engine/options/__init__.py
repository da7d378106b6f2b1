"""Options of a strategy and an exchange, described and checked without torch."""
