"""What a user may give to a strategy and an exchange, described and checked without torch."""
