"""The server: takes requests, asks the policy, steps the master parameters, answers.

An actor without I/O. It knows no processes, no sockets and no Lightning.
"""
