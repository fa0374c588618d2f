"""A chat as a picture: readable as text, safe as HTML."""

from __future__ import annotations

from ddl_magics.views.transcript import Transcript


def chat():
    transcript = Transcript("chat 1 with <Model>")
    transcript.add("you", "Is 1 < 2?\nAnd <b>?")
    transcript.add("model", "Yes & yes").below = "3 tokens, 1.0 tokens/s"
    transcript.add("error", "stopped <here>")
    return transcript


def test_the_text_says_who_said_what():
    assert chat().plain() == (
        "chat 1 with <Model>\nyou> Is 1 < 2?\nAnd <b>?\nmodel> Yes & yes  (3 tokens, 1.0 tokens/s)\nstopped <here>"
    )


def test_nothing_that_was_said_is_taken_for_html():
    html = chat().html()
    assert "Is 1 &lt; 2?\nAnd &lt;b&gt;?" in html
    assert "Yes &amp; yes" in html
    assert "stopped &lt;here&gt;" in html
    assert "&lt;Model&gt;" in html
    assert html.count("<div") == html.count("</div>") == 6


def test_clear_leaves_the_title():
    transcript = chat()
    transcript.clear()
    assert transcript.plain() == "chat 1 with <Model>"
