"""What ``scripts/golden.py`` runs, and how it holds two outcomes against each other."""
