"""Backends: what runs the model, one package for each kind.

process   a GPU worker: `backend` is what the batcher calls, `child_process` keeps one child alive, `frames` are the messages
          on its pipe, `output_lines` logs its prints, `group_guard` ends its descendants; `child` and `usercode` run inside it
remote    what all remote APIs share: `backend` retries and assigns blame, `reader` decodes large answers
http      a remote API over HTTP: `backend` is what the batcher calls, over `connections`
grpc      a remote API over gRPC: `backend`
"""
