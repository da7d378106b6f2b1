"""The parts of the benchmark: what is measured against what, and which ratio is the goal.

Here live functions ``rows(frame)``, one module each, and jobs that are short and their part's own.
How runs are started, compared and shown is one folder up, and no part knows another's rows.
"""
