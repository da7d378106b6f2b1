"""``task=hogwild``: the three problems of Hogwild! (Niu et al. 2011, arXiv:1106.5730).

Each example of a sparse support vector machine, of a matrix completion or of a graph cut touches a
few of many numbers, so that workers which write without a lock rarely meet.
"""
