"""The cases that ``scripts/golden.py`` runs, and the comparison of two outcomes."""
