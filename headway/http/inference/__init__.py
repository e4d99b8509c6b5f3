"""Inference routes over HTTP. The connection object answers these requests itself. Start reading at `fast_path`."""
