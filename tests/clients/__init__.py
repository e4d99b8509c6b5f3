"""Real clients, run as their users run them: by a separate interpreter, with their own packages.

`NAME.txt` locks the Python environment NAME, `NAME/package-lock.json` the Node one; `make lock` updates them. The programs
here run in these environments, which `make clients` creates; see `environments`.
"""
