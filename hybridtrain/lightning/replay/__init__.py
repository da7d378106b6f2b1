"""Record a ``fit``, replay it to the bit, and run it in virtual time."""
