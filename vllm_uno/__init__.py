"""UNO for stock vLLM: lossless speculative decoding with no draft model.

Method: *Unlocking Lossless Speedups in LLMs via Discrete Diffusion* (arXiv
2609.04010). The data's path through the package:

`config` -> `vllm_hooks` -> `draft_view` (+ `adapter`, `lora_linear`) ->
`proposer` (+ `draft_inputs`, `draft_sampling`, `draft_law`, `draft_graphs`) -> vLLM's own
rejection sampler (`verification`) -> `metrics`. Tree mode (`tree`) has its own drafting,
attention and verification between the same draft pass and metrics.
"""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it once in every process.

    Never raises: vLLM only logs a plugin's exception, so whatever is wrong is
    kept and raised by the engine that asks for `method: uno`.
    """
    from vllm_uno.vllm_hooks import install

    install()


def register_cpu_interpreter() -> None:
    """Entry point of `vllm.platform_plugins`; runs before vLLM looks for Triton.

    Returns None (it is no platform); acts only when `UNO_CPU_INTERPRETER=1`.
    """
    from vllm_uno.vllm_hooks.cpu_interpreter import offer_cpu_backend

    offer_cpu_backend()
