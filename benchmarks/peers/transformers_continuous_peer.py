"""transformers' own continuous batching, 16 sequences at a time, as a peer of ``compare.py``."""

from __future__ import annotations

from in_process import InProcessPeer
from peer_protocol import serve

if __name__ == "__main__":
    serve(lambda options: InProcessPeer("transformers", options))
