"""The worker's side: requests to the server, gradients out, parameters in.

It uses the shared memory and a connection to the server, but neither Lightning nor a policy.
``client.py`` names the parts of a worker's connection, each of which is a file here.
"""
