"""Traps of the design that do not apply here, and why."""

NOT_APPLICABLE: dict[int, str] = {}
