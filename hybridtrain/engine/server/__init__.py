"""The server: takes requests, asks the policy, steps the master parameters, answers.

An actor without I/O, processes, sockets or Lightning.
"""
