"""Lightning's private names, behind functions with plain names: used in this folder only."""
