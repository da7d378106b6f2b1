"""What policies, workers and the server say to each other: facts, orders, requests, replies,
notices.

Plain data only: no tensors, no processes, no clocks, no decisions.
"""
