"""Workers without data in a step or an epoch: they run no user code there."""
