"""Recording a ``fit``, repeating it to the bit, and running it in virtual time."""
