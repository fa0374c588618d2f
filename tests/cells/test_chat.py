"""A chat with a model on the ranks, in a real kernel: what the box sends and shows, `%ddl chat`, and mistakes."""

from __future__ import annotations

import os
import queue
import signal
import time

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]

OPEN = """%%ddl --no-panel --strategy {strategy}
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
if "tokenizer" not in globals():
    tokenizer = AutoTokenizer.from_pretrained({folder!r})
with ddl.model_init():
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings={positions}))
model = ddl.prepare(model)
ddl.chat(model, tokenizer, system="Be <b>brief</b>.", max_new_tokens={tokens}, eos_token_id=None)
"""
BOX = "get_ipython().magics_manager.registry['DDLMagics'].session._chat.box"


class Box:
    """A box as the front end drives it."""

    def __init__(self, book):
        self.book = book
        parts = [f"box.{part}.comm.comm_id" for part in ("field", "buttons['Stop']", "buttons['Clear']")]
        self.field, self.stop, self.clear = book.value(f"(lambda box: [{', '.join(parts)}])({BOX})")
        self.drawn: dict[str, dict] = {}
        """Data of each display, as it is now."""

    def tell(self, comm, data):
        client = self.book.client
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": comm, "data": data}))

    def say(self, text):
        self.tell(self.field, {"method": "update", "state": {"value": text}, "buffer_paths": []})
        self.tell(self.field, {"method": "custom", "content": {"event": "submit"}})

    def press(self, comm):
        self.tell(comm, {"method": "custom", "content": {"event": "click"}})

    def until(self, holds, timeout=40):
        """Read what the kernel sends until the transcript is as wanted; the transcript."""
        deadline = time.monotonic() + timeout
        while not holds(self.text):
            assert time.monotonic() < deadline, f"the transcript is still:\n{self.text}"
            try:
                message = self.book.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            if message["msg_type"] in {"update_display_data", "display_data"}:
                content = message["content"]
                self.drawn[content["transient"].get("display_id")] = content["data"]
        return self.text

    @property
    def text(self):
        return next((data["text/plain"] for data in self.drawn.values() if "chat " in data["text/plain"]), "")

    @property
    def html(self):
        return next(data["text/html"] for data in self.drawn.values() if "ddl-chat" in data.get("text/html", ""))


def answered(times):
    return lambda text: text.count("tokens/s)") == times


def opened(ranks2, smollm2, strategy="ddp", positions=2048, tokens=4):
    shown = ranks2.run(
        OPEN.format(strategy=strategy, folder=str(smollm2), positions=positions, tokens=tokens), timeout=60
    )
    assert shown.ename is None, shown.text
    return shown


def test_the_box_answers_and_the_transcript_stays(ranks2, smollm2):
    shown = opened(ranks2, smollm2)
    transcript, controls = shown.displays
    assert transcript["text/plain"].startswith("chat 1 with LlamaForCausalLM under ddp")
    assert "application/vnd.jupyter.widget-view+json" not in transcript, "a saved notebook would lose it"
    assert "application/vnd.jupyter.widget-view+json" in controls
    box = Box(ranks2)
    box.say("Hello <i>there</i>")
    text = box.until(answered(1))
    assert "\nyou> Hello <i>there</i>\nmodel> " in text
    assert "(4 tokens, " in text
    assert "Hello &lt;i&gt;there&lt;/i&gt;" in box.html
    box.say("And again?")
    box.until(answered(2))
    messages = said_on(ranks2, 1)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages == said_on(ranks2, 0)


def said_on(book, rank):
    shown = book.run(f"%%ddl --ranks {rank}\nddl._chat.messages")
    return eval(shown.displays[-1]["text/plain"])


def test_clear_forgets_on_all_ranks(ranks2, smollm2):
    opened(ranks2, smollm2)
    box = Box(ranks2)
    box.say("Hello")
    box.until(answered(1))
    box.press(box.clear)
    box.until(lambda text: "you>" not in text)
    assert said_on(ranks2, 0) == said_on(ranks2, 1) == []


def test_stop_ends_an_answer_after_the_token_it_is_at(ranks2, smollm2):
    """Under zero:3, whose ranks need one another until the last token."""
    pytest.importorskip("deepspeed")
    opened(ranks2, smollm2, strategy="zero:3", tokens=1500)
    box = Box(ranks2)
    box.say("Tell me everything")
    box.until(lambda text: len(text.partition("model> ")[2]) > 20)
    box.press(box.stop)
    text = box.until(answered(1))
    count = int(text.rpartition("(")[2].split()[0])
    assert 0 < count < 1500
    assert [message["role"] for message in said_on(ranks2, 1)] == ["user", "assistant"]


def test_a_cell_that_runs_is_told_in_the_box(ranks2, smollm2, tmp_path):
    opened(ranks2, smollm2)
    box = Box(ranks2)
    gate = tmp_path / "go on"
    ranks2.run(f"%%ddl --bg\nimport os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.02)")
    box.say("Hello")
    text = box.until(lambda text: "A cell runs in the background" in text)
    assert text.count("\n") == 1
    gate.touch()
    assert ranks2.run("%ddl wait").ename is None


def test_what_fails_on_the_ranks_is_a_line_of_the_transcript(ranks2, smollm2):
    opened(ranks2, smollm2, positions=32, tokens=30)
    box = Box(ranks2)
    box.say("Hello")
    text = box.until(lambda text: "positions of the model" in text)
    assert text.splitlines()[-1].startswith("ranks 0-1 failed with UsageOnRankError: Prompt 0 has "), text
    assert "model>" not in text
    ranks2.run("%%ddl\ndel model")
    box.say("Still there?")
    box.until(lambda text: "The model of this chat" in text)


def test_percent_chat_talks_without_a_box(ranks2, smollm2):
    """With a model of rank 0 alone, so that the next chat, of all ranks, is not their second."""
    opened(ranks2, smollm2, strategy="single")
    shown = ranks2.run('%ddl chat "What\'s that?"')
    assert shown.ename is None, shown.text
    assert len(shown.stdout.strip()) > 0
    reply = ranks2.send("%ddl chat")
    assert ranks2.answer(["And?", ""]) == ["you> ", "you> "]
    assert ranks2.result(reply).ename is None
    shown = ranks2.run("%ddl chat", allow_stdin=False)
    assert shown.text.strip() == 'UsageError: this front end cannot ask for input. Write %ddl chat "your message".'
    assert [message["content"] for message in said_on(ranks2, 0)][::2] == ["What's that?", "And?"]


def test_a_headless_notebook_gets_a_line(ranks2, smollm2):
    code = OPEN.format(strategy="ddp", folder=str(smollm2), positions=64, tokens=2)
    shown = ranks2.run(code, timeout=60, allow_stdin=False)
    assert shown.stdout.strip().endswith(": %ddl chat talks to it")
    assert ranks2.run('%ddl chat "Hello"', allow_stdin=False).ename is None


def test_a_death_is_told_in_the_box_and_the_end_of_the_ranks_closes_it(ranks2, smollm2):
    opened(ranks2, smollm2, tokens=1500)
    box = Box(ranks2)
    box.say("Hello")
    box.until(lambda text: len(text.partition("model> ")[2]) > 20)
    pid = ranks2.value("get_ipython().magics_manager.registry['DDLMagics'].session.cells.cluster.facts[1]['pid']")
    os.kill(pid, signal.SIGKILL)
    text = box.until(lambda text: "rank 1 died" in text)
    assert text.splitlines()[-1].startswith("rank 1 died (signal 9 Killed")
    assert "model> " in text, "what was said stays"
    reply = ranks2.send("%ddl stop")
    box.until(lambda _: any(data == {"text/plain": "", "text/html": ""} for data in box.drawn.values()))
    assert "you> Hello" in box.text
    ranks2.result(reply, timeout=60)
    assert ranks2.run("%ddl chat Hello").evalue.startswith("no chat is open")
