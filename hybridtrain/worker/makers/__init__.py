"""Makers apply updates for a worker, or leave them to the server: one contract.

``maker.py`` has the contract, ``choice.py`` the choice of the maker. The server's part is in
:mod:`hybridtrain.server.workers_updates`.
"""
