"""Training without Lightning: the public ``Server`` and ``Worker``, and DeepDist, also on Spark.

The user's function is the loop of a worker. Lightning's strategy is made of the same parts
(:mod:`hybridtrain.engine.scheme`, :mod:`hybridtrain.engine.step.session`).

It must not know Lightning, Hydra, the tasks or the pages of the report.
"""
