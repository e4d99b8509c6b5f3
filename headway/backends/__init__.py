"""Ways to the black box: one kind, one file.

`process` a GPU worker (its parts: `lifetime` of one child, `lines` it prints, `frames` on its pipe, `group_guard` of what it
has started; and inside the child `child` and `usercode`) · `http` a remote API (and `remote_answer`, what it says, `remote_reader`, when that is long)
"""
