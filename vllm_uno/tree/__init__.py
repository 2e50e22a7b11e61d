"""Tree mode: candidates of the draft rows, the tree built of them, its verification.

`candidates` takes each draft row's best K tokens, `builder` grows the tree of V nodes that
is verified and keeps it in device buffers by request-state slot, `walk` follows the target's
own samples through it, `compaction` moves the KV of the accepted path to where the next step
expects it. Every kernel has a plain PyTorch or Python reference beside it, its tests' oracle.
Symbols as in the rest of the package: B draft rows a request, K candidates a row, V nodes,
C the position of the seed.
"""
