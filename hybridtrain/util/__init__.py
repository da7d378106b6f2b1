"""Small helpers that know nothing of training: files, arguments, types of options, streams.

Every room may import this one; it must not know any other.
"""
