"""transformers' ``generate`` over padded batches of 16, as a peer of ``compare.py``."""

from __future__ import annotations

from in_process import InProcessPeer
from peer_protocol import serve

if __name__ == "__main__":
    serve(lambda options: InProcessPeer("static", options))
