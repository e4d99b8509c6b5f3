"""Ways to the black box: one package for each kind.

process   a GPU worker: `backend` is what the batcher calls, `child_process` one child's life, `frames` its pipe's
words,
          `output_lines` its prints, `group_guard` ends its descendants; `child` and `usercode` run inside the child
http      a remote API: `backend` is what the batcher calls, `answer` reads an answer, `reader` reads a long one
"""
