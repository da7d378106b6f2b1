"""Messages between policy, server and workers: facts, orders, requests, replies, notices.

Plain data only: no tensors, no processes, no clocks, no decisions.
"""
