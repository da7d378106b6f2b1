"""The worker's side: requests to the server, gradients out, parameters in.

Knows the shared memory and a connection to the server; knows no Lightning and no policy.
"""
