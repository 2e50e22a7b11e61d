"""Training of UNO adapters: one-step block distillation of a frozen model (arXiv 2609.04010, §3).

    settings -> data (packed rows) -> blocks (noise, mask) -> model (gated LoRA) -> losses
             -> trainer (curriculum, checkpoints) -> acceptance (held-out tau) -> adapter folder

Needs the `train` extra (`draft_vocab` does not); vLLM itself is not imported here.
"""
