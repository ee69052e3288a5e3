"""Where the bytes lie: LMCache or a segment of our own for L1, Redis through LMCache for L2."""
