"""Clients that people have, each run as they run it: by an interpreter of its own, with its own packages.

`NAME.txt` is the lock of environment NAME for Python, and `NAME/package-lock.json` of one for Node; `make lock` writes them anew. The
programs here are what runs in the environments. `make clients` makes these; see `environments`.
"""
