"""How faults on purpose are carried out, in the parent and in workers."""
