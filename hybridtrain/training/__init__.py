"""Training without Lightning: a worker's session, the public server and worker.

Lightning's strategy is made of the same parts.
"""
