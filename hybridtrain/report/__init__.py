"""Self-contained pages: figures, tables and text in one file, for a phone and without a network.

``page.py`` and ``svg.py`` make the parts and escape all text; the other files read the folders of
runs and lay the parts out.

A page is made of what lies in files or is given to it. This folder must not know Lightning, Hydra,
other hosts, virtual time or the commands that call it.
"""
