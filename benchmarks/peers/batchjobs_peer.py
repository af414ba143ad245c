"""This engine alone, as a peer of ``compare.py``, the logprob of each token kept."""

from __future__ import annotations

from in_process import InProcessPeer
from peer_protocol import serve

if __name__ == "__main__":
    serve(lambda options: InProcessPeer(None, options))
