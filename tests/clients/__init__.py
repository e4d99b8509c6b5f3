"""Clients that people have, each run as they run it: by an interpreter of its own, with its own packages.

`NAME.txt` lists the packages of environment NAME (where there is a `NAME.in`, `make lock` makes the list of it, by hash), and a program here is what runs in it. `make clients` makes the environments; see
`environments`.
"""
