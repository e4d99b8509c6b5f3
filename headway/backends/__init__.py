"""Ways to the black box: one kind, one package.

process   a GPU worker: `backend` what the batcher calls, `child_process` one child's life, `frames` on its pipe, `output_lines`
          it prints, `group_guard` of what it has started; and inside the child `child` and `usercode`
http      a remote API: `backend` what the batcher calls, `answer` what it says, `reader` when that is long
"""
