"""How far can a drafter go that knows each of the next B tokens exactly, but only one by one?

UNO drafts all B tokens at once, each from its own law given the text so far, blind to what was
drawn for the others. The best such drafter draws token i from its exact marginal

    q_i(x) = P(token at offset i is x | the text so far).

Verified by speculative rejection sampling against the model's law p it emits, per cycle,

    tau = 1 + sum over k = 1..B of P(first k drafted are accepted),
    P(first k are accepted) = E over x ~ p of prod over i < k of min(1, q_i(x_i) / p(x_i | x_<i)).

This script measures that tau on the bundled model's answers. The entropy of the text sets it; a
trained adapter comes near it, as far as its drafts are as good as the marginals. The texts are
drawn from the problem generator or from a trained model (on a GPU if there is one):

    python benchmarks/drafting_bound.py --source generator --tokenizer MODEL_FOLDER
    python benchmarks/drafting_bound.py --source model --model MODEL_FOLDER

**Cycles follow each other as they do in decoding**: a block starts where the last one ended, mostly
just behind a rejection. To draw x ~ p, and to accept its tokens one after the other with the
chances min(1, q/p) up to the first refusal, has the same law as the real process, and emits x up to
and including the refused offset. So one of the drawn walks, cut there, moves the text on.

**Bias.** At each text one half of the samples gives q, the other half the walks: no walk counts in
the q that it is tested with. The noise left in q lowers tau a little (min(1, .) is concave), and
its part that neighbouring offsets share raises it by the order of 1/samples. With the generator, p
comes from counts of the walks, each walk itself among them: rare walks get too high a p, which
lowers tau. Tokens behind the end of an answer do not count, nor does the cycle in which it ends, as
in `vllm-uno eval-adapter` and in the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_uno.bundled import bundled_model
from vllm_uno.bundled.problems import Content, contents, continuations, write

Tokens = list[int]
LONGEST = 400  # tokens of an answer: a model may never end one


@dataclass
class Draws:
    """Independent continuations of one text, cut at the end token (kept) or after the block.

    `chances[n][i]` is p(tokens[n][i] | the text, tokens[n][:i]); None: to be counted.
    """

    tokens: list[Tokens]
    chances: list[list[float]] | None = None


@dataclass
class Bound:
    tau: float
    low: float  # 95 % bootstrap interval over the problems
    high: float
    accepted: list[float]  # P(first k drafted are accepted), k = 1..B, over all cycles
    cycles: int


def marginals(samples: Sequence[Tokens], block: int) -> list[dict[int, float]]:
    """q_i for each offset, from samples. Those that end before an offset have no token there."""
    counts = [Counter(s[i] for s in samples if i < len(s)) for i in range(block)]
    return [{token: n / len(samples) for token, n in count.items()} for count in counts]


def counted_chances(walks: Sequence[Tokens]) -> list[list[float]]:
    """p(x_i | x_<i) along each walk: of the walks that agree so far, how many go the same way."""
    count: Counter[tuple[int, ...]] = Counter()
    for walk in walks:
        count.update(tuple(walk[:length]) for length in range(len(walk) + 1))
    return [
        [count[tuple(walk[: i + 1])] / count[tuple(walk[:i])] for i in range(len(walk))]
        for walk in walks
    ]


def acceptance(
    q: list[dict[int, float]], walk: Tokens, chances: list[float], block: int, end: int
) -> list[float]:
    """min(1, q/p) at each offset of one walk, 0 where no further token would count."""
    ratios = [min(1.0, q[i].get(walk[i], 0.0) / chances[i]) for i in range(min(block, len(walk)))]
    ratios[0] = 1.0  # drawn from the model's own law
    if end in walk[:block]:
        ratios[walk.index(end)] = 0.0  # a rejection or a bonus token fills this place just as well
    return ratios + [0.0] * (block - len(ratios))


def products(ratios: list[float]) -> list[float]:
    out, product = [], 1.0
    for ratio in ratios:
        product *= ratio
        out.append(product)
    return out


def cycle(draws: Draws, block: int, end: int, rng: random.Random) -> tuple[list[float], Tokens]:
    """One cycle at one text: P(first k drafted are accepted), k = 1..block, and what it emits."""
    half = len(draws.tokens) // 2
    q = marginals(draws.tokens[:half], block)
    walks = draws.tokens[half:]
    chances = draws.chances[half:] if draws.chances else counted_chances(walks)
    ratios = [acceptance(q, walk, p, block, end) for walk, p in zip(walks, chances, strict=True)]
    mean = [sum(column) / len(ratios) for column in zip(*map(products, ratios), strict=True)]
    taken = 0
    while taken < block and rng.random() < ratios[0][taken]:
        taken += 1
    return mean, walks[0][: taken + 1]


def bound(
    sources: Sequence[Callable[[Tokens, int], Draws]], block: int, end: int, seed: int = 0
) -> Bound:
    """tau at one block size over several problems.

    Each source draws continuations of one problem's answer: (answer tokens so far, tokens needed)
    -> draws, of which the walks must be `block + 1` tokens long or end with `end`.
    """
    rng = random.Random(seed)
    per_problem: list[list[list[float]]] = []
    for source in sources:
        # The prefill gives the first token; the cycles start behind it.
        answer = source([], 1).tokens[0][:1]
        cycles = []
        while answer[-1] != end and len(answer) < LONGEST:
            accepted, emitted = cycle(source(answer, block + 1), block, end, rng)
            cycles.append(accepted)
            answer = answer + emitted
        per_problem.append(cycles[:-1])
    sums = [(sum(1 + sum(c) for c in cycles), len(cycles)) for cycles in per_problem]
    taus = []
    for _ in range(2000):
        picked = rng.choices(sums, k=len(sums))
        taus.append(sum(s for s, _ in picked) / sum(n for _, n in picked))
    taus.sort()
    every = [accepted for cycles in per_problem for accepted in cycles]
    return Bound(
        tau=sum(s for s, _ in sums) / len(every),
        low=taus[50],
        high=taus[-51],
        accepted=[sum(column) / len(every) for column in zip(*every, strict=True)],
        cycles=len(every),
    )


def generator_source(
    content: Content, tokenizer: Any, samples: int, seed: int
) -> Callable[[Tokens, int], Draws]:
    """Continuations from the problem generator's exact law."""
    rng = random.Random(seed)

    def draw(answer: Tokens, length: int) -> Draws:
        prefix = tokenizer.decode(answer)
        texts = continuations(content, prefix, samples, rng.getrandbits(32))
        tokens = [
            [*ids, tokenizer.eos_token_id][: len(answer) + length]
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
        # A text may go on inside the last word ("give" as the beginning of "gives"): these start
        # with the same letters, but not with the same tokens.
        return Draws([ids[len(answer) :] for ids in tokens if ids[: len(answer)] == answer])

    return draw


def model_source(
    question: str, model: Any, tokenizer: Any, samples: int
) -> Callable[[Tokens, int], Draws]:
    """Continuations sampled from a model at temperature 1, with the model's own p."""
    import torch

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=False,
    )
    end = tokenizer.eos_token_id

    @torch.inference_mode()
    def draw(answer: Tokens, length: int) -> Draws:
        text = torch.tensor([prompt + answer], device=model.device)
        output = model.generate(
            text,
            attention_mask=torch.ones_like(text),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            num_return_sequences=samples,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = output.sequences[:, text.shape[1] :]  # [samples, <= length]
        laws = torch.stack(output.logits, 1).float().log_softmax(-1)  # [samples, <= length, vocab]
        chances = laws.gather(-1, new[..., None])[..., 0].exp().tolist()
        rows = new.tolist()
        sizes = [row.index(end) + 1 if end in row else len(row) for row in rows]
        return Draws(
            [row[:size] for row, size in zip(rows, sizes, strict=True)],
            [row[:size] for row, size in zip(chances, sizes, strict=True)],
        )

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description="tau of a drafter with exact marginals")
    parser.add_argument("--source", choices=("generator", "model"), default="generator")
    parser.add_argument("--model", help="folder (default: the bundled model)")
    parser.add_argument("--tokenizer", help="folder of the tokenizer; default: the model's")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=512, help="continuations per text, >= 128")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="F.json", help="the figures by block size")
    args = parser.parse_args()
    if args.model is None:
        args.model = str(bundled_model())

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    end = tokenizer.eos_token_id
    chosen = list(contents("test", args.problems, args.seed))
    if args.source == "generator":
        sources = [
            generator_source(content, tokenizer, args.samples, args.seed + n)
            for n, content in enumerate(chosen)
        ]
    else:
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(args.seed)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(args.model).to(device).eval()
        rng = random.Random(args.seed)
        questions = [write(content, rng).question for content in chosen]
        sources = [model_source(q, model, tokenizer, args.samples) for q in questions]
    found = {}
    for block in args.blocks:
        result = bound(sources, block, end, args.seed)
        chances = " ".join(f"{p:.2f}" for p in result.accepted)
        print(
            f"B={block}: tau {result.tau:.2f} [{result.low:.2f}, {result.high:.2f}] over "
            f"{result.cycles} cycles of {args.problems} problems\n  accepted at least k: {chances}",
            flush=True,
        )
        found[block] = dataclasses.asdict(result)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
