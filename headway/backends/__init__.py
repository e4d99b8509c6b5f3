"""Backends: what runs the model, one package for each kind.

process   a GPU worker: `backend` is what the batcher calls, `child_process` one child's life, `frames` its pipe's words,
          `output_lines` its prints, `group_guard` ends its descendants; `child` and `usercode` run inside the child
remote    what all remote APIs share: `backend` retries and blames, `credentials`, `reader` reads a long answer
http      a remote API over HTTP: `backend` is what the batcher calls, `connections`, `verdicts` on its statuses
grpc      one over gRPC: `backend`, `verdicts` on its statuses
"""
