"""Run on each of two ranks: `ddl.generate` under every strategy, beside transformers' own generate in one process.

Started as `generation_ranks.py FOLDER SMOLLM2`; the tests judge what is found. Each strategy is one cell.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from ddl_magics.errors import DDLError
from ddl_magics.protocol import CellRequest
from ddl_magics.rank.alone import world_of_one
from ddl_magics.rank.program import init
from tests.strategies.models import MLP, llama
from tests.strategies.ranks import Notes

logging.disable_progress_bar()
torch.set_num_threads(1)
ddl = init("ddp", device="cpu")
notes = Notes(sys.argv[1], ddl.rank)
folder = sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(folder)
cells = iter(range(1, 1000))

GATHERED = ("zero:3", "fsdp")
GRIDS = ("axonn:2x1x1", "axonn:1x2x1", "axonn:1x1x2")
ALL = ("ddp", "zero:1", "zero:2", *GATHERED, *GRIDS)
PROMPTS = ([5, 9, 11, 4], [7], [1, 2, 3, 4, 5, 6, 7, 8], [33, 8, 2], [60, 1])
"""Of the small model, which knows 64 tokens."""
REAL = ("Once upon a time", [{"role": "user", "content": "What is the capital of France?"}])
"""Of SmolLM2: texts of different lengths, and a chat, which ends by itself."""


def begin(strategy: str, **options: Any) -> None:
    """Begin a cell as the notebook would."""
    number = next(cells)
    request = CellRequest(code="", cell=number, run=f"run{number}", name="", strategy=strategy, **options)
    ddl.recorder.start_run(request.run)
    ddl.begin_cell(request)


def sharpened() -> Any:
    """A small model, sharper than a fresh one: no two tokens are nearly as probable. It ends a text with token 2."""
    model = llama(tied=False)
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return model


def small(strategy: str, *, train: bool = False) -> Any:
    """The small model, prepared; to `train` with an optimizer, so that ZeRO makes an engine in every stage."""
    begin(strategy)
    with ddl.model_init(seed=3):
        model = sharpened()
    if not train:
        return ddl.prepare(model)
    return ddl.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[0]


def alone() -> Any:
    """The same small model in one process, as transformers has it."""
    torch.manual_seed(3)
    return sharpened().eval()


def plainly(module: Any, prompts: Any, **options: Any) -> list[list[int]]:
    """What transformers' own generate makes of each prompt alone, without the token that ends it."""
    made = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = module.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **options)
        new = output[0, len(prompt) :].tolist()
        made.append(new[:-1] if new[-1] == module.generation_config.eos_token_id else new)
    return made


def said(action: Any, *given: Any, **options: Any) -> str:
    """The one line that a user reads; empty where nothing was refused."""
    try:
        action(*given, **options)
    except DDLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Checks: each returns what JSON can hold.


def greedy_on_a_small_model() -> dict[str, Any]:
    """Every prompt, in batches of any size, with ranks that have one prompt, none, or more than others."""
    whole = {"max_new_tokens": 6, "eos_token_id": None}
    ending = {"max_new_tokens": 8}
    long = {"max_new_tokens": 10}
    module = alone()
    found: dict[str, Any] = {
        "plain": [
            plainly(module, PROMPTS, **whole),
            plainly(module, PROMPTS, **ending),
            plainly(module, PROMPTS[:1], **long),
        ]
    }
    for strategy in ALL:
        model = small(strategy, train=True)
        for gather in (None, False) if strategy in GATHERED else (None,):
            made = ddl.generate(model, PROMPTS, gather=gather, **whole)
            found[f"{strategy} {made.figures.gathered}".strip()] = [
                made.tokens,
                ddl.generate(model, PROMPTS, batch_size=2, gather=gather, **ending).tokens,
                ddl.generate(model, PROMPTS[0], gather=gather, **long).tokens,
            ]
    return found


def greedy_on_the_real_model() -> dict[str, Any]:
    """SmolLM2 as it is, in fp32: a text, and a chat that ends by itself."""
    text = tokenizer.apply_chat_template(REAL[1], tokenize=False, add_generation_prompt=True)
    tokens = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in (REAL[0], text)]
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    found: dict[str, Any] = {"plain": plainly(module, tokens, max_new_tokens=8)}
    for strategy in ("ddp", *GATHERED, *GRIDS):
        begin(strategy)
        with ddl.model_init():
            model = AutoModelForCausalLM.from_pretrained(folder)
        count = 3 if strategy in GRIDS else 8
        made = ddl.generate(ddl.prepare(model), REAL, tokenizer=tokenizer, max_new_tokens=count)
        found[strategy] = {"tokens": made.tokens, "texts": list(made)}
        del model
        ddl.forget_dropped_models()
    return found


def sampled() -> dict[str, Any]:
    """The same seed under several strategies, batch sizes, and in one process; then other seeds."""
    shaped = {"max_new_tokens": 5, "temperature": 3.0, "top_k": 40, "eos_token_id": None}
    found = {}
    for strategy in ("ddp", "zero:3", "axonn:2x1x1"):
        model = small(strategy)
        found[strategy] = ddl.generate(model, PROMPTS, seed=11, **shaped).tokens
    with world_of_one():
        begin("single")
        model = ddl.prepare(alone())
        found["single"] = ddl.generate(model, PROMPTS, seed=11, **shaped).tokens
        found["one at a time"] = ddl.generate(model, PROMPTS, seed=11, batch_size=1, **shaped).tokens
        found["another seed"] = ddl.generate(model, PROMPTS, seed=12, **shaped).tokens
        found["twice the same prompt"] = ddl.generate(model, [PROMPTS[0]] * 2, seed=11, **shaped).tokens
        found["copies"] = ddl.generate(model, PROMPTS[:2], seed=11, num_return_sequences=2, **shaped).tokens
    model = small("ddp")
    torch.manual_seed(5 + ddl.rank)
    first, second = (ddl.generate(model, PROMPTS, **shaped) for _ in range(2))
    found["unseeded"] = [first.tokens, second.tokens]
    found["again by its seed"] = ddl.generate(model, PROMPTS, seed=first.figures.seed, **shaped).tokens
    return found


def searched() -> dict[str, Any]:
    """A beam search, also where ranks need one another in every forward."""
    options = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": None}
    found: dict[str, Any] = {"plain": plainly(alone(), PROMPTS[:3], **options)}
    for strategy, gather in (("ddp", None), ("zero:3", False), ("axonn:2x1x1", None)):
        found[strategy] = ddl.generate(small(strategy), PROMPTS[:3], gather=gather, **options).tokens
    made = ddl.generate(small("ddp"), PROMPTS[:2], num_return_sequences=2, **options)
    found["several"] = [len(made), made.tokens[::2]]
    return found


def models_that_were_not_prepared() -> dict[str, Any]:
    found: dict[str, Any] = {"plain": plainly(alone(), PROMPTS, max_new_tokens=4)}
    for strategy in ("ddp", "zero:3", "axonn:2x1x1"):
        begin(strategy)
        with ddl.model_init(seed=3):
            model = sharpened()
        found[strategy] = ddl.generate(model, PROMPTS, max_new_tokens=4).tokens
    return found


def what_is_left_of_a_model() -> dict[str, Any]:
    """Modes, gradients, hooks and memory, after text was made with the weights gathered once, and a step after it."""
    found = {}
    batch = {"input_ids": torch.tensor([PROMPTS[2]]), "labels": torch.tensor([PROMPTS[2]])}
    for strategy in ("zero:3", "fsdp"):
        losses = []
        for speaks in (False, True):
            model = small(strategy, train=True)
            model.model.layers[1].eval()
            model.model.layers[0].register_forward_hook(lambda *_: None)
            before = ddl.memory()["parameters"]
            config = model.generation_config
            for _ in range(2):
                if speaks:
                    ddl.generate(model, PROMPTS, max_new_tokens=3)
                    kept = [part.training for part in (model, model.model.layers[0], model.model.layers[1])]
                    gradients = [name for name, p in ddl.unwrap(model).named_parameters() if p.grad is not None]
                    found[strategy] = {
                        "modes": kept,
                        "gradients": gradients,
                        "memory": [before, ddl.memory()["parameters"]],
                        "config": model.generation_config is config,
                    }
                loss = model(**batch).loss
                ddl.backward(loss)
                ddl.step()
                losses.append(loss.item())
        found[strategy]["losses"] = [losses[:2], losses[2:]]
    return found


def streamed() -> dict[str, Any]:
    """What is printed on this rank, and what a function is called with."""
    begin("ddp")
    model = AutoModelForCausalLM.from_pretrained(folder)
    heard: list[tuple[int, str, bool]] = []
    asked = ["Once upon a time", "The capital of France is"]
    options = {"tokenizer": tokenizer, "max_new_tokens": 5}
    made = ddl.generate(model, asked, stream=lambda *said: heard.append(said), **options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ddl.generate(model, asked, stream=True, **options)
    return {"texts": list(made), "heard": heard, "printed": printed.getvalue()}


def figures() -> dict[str, Any]:
    model = small("ddp")
    made = ddl.generate(model, PROMPTS, max_new_tokens=4, batch_size=1, eos_token_id=None)
    # 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes, for the longest prompt and the new tokens but the last
    found = made.figures
    points = [(point.name, point.step) for point in ddl.recorder.drain()["points"]]
    return {
        "cache": [found.cache, 2 * 2 * 2 * 8 * 4 * (max(map(len, PROMPTS)) + 3)],
        "tokens": found.tokens,
        "prompts": found.prompts,
        "ranks": found.ranks,
        "positive": [found.seconds, found.first_token, found.between_tokens, found.between_tokens_p95, found.memory],
        "report": made.report(),
        "points": points,
    }


def mistakes() -> dict[str, str]:
    """Each is one line, on both ranks; the calls after them go on well."""
    model = small("ddp")
    found = {
        "no tokenizer": said(ddl.generate, model, ["Hello"]),
        "too long": said(ddl.generate, model, [[1], [1] * 30], max_new_tokens=8),
        "no tokens wanted": said(ddl.generate, model, [[1]], max_new_tokens=0),
        "no prompts": said(ddl.generate, model, []),
        "empty prompt": said(ddl.generate, model, [[1], []]),
        "foreign token": said(ddl.generate, model, [[1, 64]]),
        "no option": said(ddl.generate, model, [[1]], temprature=0.5),
        "ours": said(ddl.generate, model, [[1]], output_scores=True),
        "batch size": said(ddl.generate, model, [[1]], batch_size=0),
        "sampled beams": said(ddl.generate, model, [[1]], num_beams=2, do_sample=True),
        "greedy copies": said(ddl.generate, model, [[1]], num_return_sequences=2),
        "no prompt": said(ddl.generate, model, 3),
        "stop strings": said(ddl.generate, model, [[1]], stop_strings=["x"]),
        "other prompts": said(ddl.generate, model, [[1 + ddl.rank]], max_new_tokens=2),
        "one rank's mistake": said(ddl.generate, model, [[1]] if ddl.rank else [], max_new_tokens=2),
        "no language model": said(ddl.generate, MLP(), [[1]]),
        "split": said(ddl.generate, small("axonn:2x1x1"), [[1]], gather=True),
    }
    begin("ddp", ranks=(0,))
    found["some ranks"] = said(ddl.generate, model, [[1]])
    begin("ddp")
    found["afterwards"] = str(
        ddl.generate(model, PROMPTS[:1], max_new_tokens=4).tokens == plainly(alone(), PROMPTS[:1], max_new_tokens=4)
    )
    return found


def shards_of_a_model_that_was_closed() -> dict[str, str]:
    found = {}
    for strategy in ("fsdp", "axonn:2x1x1"):
        inner = ddl.unwrap(small(strategy))
        ddl.forget_dropped_models()
        found[strategy] = said(ddl.generate, inner, PROMPTS, max_new_tokens=2)
    return found


def chat_in_a_program() -> dict[str, Any]:
    """Rank 0 asks in its terminal, here a list of lines; all ranks keep what was said."""
    begin("zero:3")
    with ddl.model_init(seed=3):
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=64,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    model, lines = ddl.prepare(model), iter(["Hello", "How are you?", "What is your name?"])
    asked = builtins.input
    builtins.input = lambda prompt: next(lines, "")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            ddl.chat(model, tokenizer, system="Be brief.", max_new_tokens=6, eos_token_id=None)
    finally:
        builtins.input = asked
    messages, chat = list(ddl._chat.messages), ddl._chat.key
    del model
    return {
        "messages": messages,
        "printed": printed.getvalue(),
        "gone": said(ddl.reply, "Still there?", chat=chat),
        "closed": said(ddl.reply, "And you?", chat="another"),
        "no template": said(ddl.chat, small("ddp"), object()),
    }


def run(check: Any) -> None:
    began, cpu = time.monotonic(), time.process_time()
    notes.write(check.__name__, check())
    if ddl.rank == 0:
        print(
            f"{check.__name__}: {time.monotonic() - began:.1f} s, {time.process_time() - cpu:.1f} s of the CPU",
            flush=True,
        )


CHECKS = (
    mistakes,
    figures,
    sampled,
    searched,
    models_that_were_not_prepared,
    shards_of_a_model_that_was_closed,
    chat_in_a_program,
    what_is_left_of_a_model,
    greedy_on_a_small_model,
    streamed,
    greedy_on_the_real_model,
)
for check in CHECKS:
    if len(sys.argv) < 4 or check.__name__ in sys.argv[3:]:
        run(check)
ddl.close()
