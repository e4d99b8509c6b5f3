"""Routes for inference over HTTP. The connection object answers these requests itself. Begin reading at `fast_path`."""
