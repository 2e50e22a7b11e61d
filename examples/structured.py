"""Structured output with UNO: a JSON schema, a regular expression, a choice.

    python examples/structured.py                             a tiny random model, on a CPU
    python examples/structured.py --model Qwen/Qwen3-8B       a real one, on a GPU

The grammar binds the verify pass, so every token obeys it and the output is that of plain vLLM.
Drafts do not know the grammar: they are accepted less often than in free text.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm_uno.vllm_hooks.cpu_interpreter import is_cpu_build

ON_CPU = is_cpu_build()
if ON_CPU:
    # Before vLLM is imported: run its GPU kernels in Triton's interpreter, for trying only.
    os.environ.setdefault("UNO_CPU_INTERPRETER", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 40_000_000},
        "coast": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "coast"],
    "additionalProperties": False,
}
PHONE = r"\+\d{2} \d{3} \d{4}"
MOODS = ["positive", "neutral", "negative"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: a tiny random model)")
    parser.add_argument("--adapter", help="UNO adapter (default: the one UNO finds for the model)")
    parser.add_argument("--block-size", type=int, default=8, help="B (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from vllm_uno.tiny_model import write_random_adapter, write_tiny_model

            args.model = str(write_tiny_model(Path(folder, "model")))
            args.adapter = str(write_random_adapter(Path(folder, "adapter"), args.model))
        run(args)


def run(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    # {"method": "uno"} alone is enough where the model has a published adapter.
    speculative: dict[str, Any] = {"method": "uno", "num_speculative_tokens": args.block_size}
    if args.adapter:
        speculative["uno_lora_path"] = args.adapter
    llm = LLM(
        args.model,
        speculative_config=speculative,
        max_model_len=1024,
        max_num_seqs=16,
        # Or a model that does not know when to stop may write spaces without end.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        enforce_eager=ON_CPU,  # compiling takes a CPU longer than these few tokens
    )
    asked = {
        "Tell me about Lisbon as JSON.": StructuredOutputsParams(json=SCHEMA),
        "Make up a phone number.": StructuredOutputsParams(regex=PHONE),
        "How does 'I love it' sound?": StructuredOutputsParams(choice=MOODS),
    }
    # One set of parameters a request: they share a batch with any other requests.
    params = [
        SamplingParams(temperature=0.0, max_tokens=128, structured_outputs=grammar)
        for grammar in asked.values()
    ]
    try:
        answers = [output.outputs[0].text for output in llm.generate(list(asked), params)]
    finally:
        llm.llm_engine.engine_core.shutdown()  # see examples/offline.py
    for question, answer in zip(asked, answers, strict=True):
        print(f"{question!r} -> {answer!r}")
    city = json.loads(answers[0])
    print(f"parsed: {city['inhabitants']} inhabitants, on the coast: {city['coast']}")


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
