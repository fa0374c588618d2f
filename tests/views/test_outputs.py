"""Results and tracebacks of N ranks: equal ones once."""

from __future__ import annotations

from ddl_magics.protocol import Outcome
from ddl_magics.views.outputs import cause_in_words, fold_outputs, fold_tracebacks


def test_equal_results_appear_once_with_their_ranks():
    folded = fold_outputs([(0, {"text/plain": "3"}), (1, {"text/plain": "4"}), (2, {"text/plain": "3"})])
    assert [f.displays() for f in folded] == [[{"text/plain": "[0,2] 3"}], [{"text/plain": "[1] 4"}]]


def test_results_of_several_lines_begin_under_their_label():
    (folded,) = fold_outputs([(0, {"text/plain": "a\nb"}), (1, {"text/plain": "a\nb"})])
    assert folded.displays() == [{"text/plain": "[0-1]\na\nb"}]


def test_addresses_do_not_make_results_differ():
    outputs = [(r, {"text/plain": f"<Model object at 0x7f31{r:08x}>"}) for r in range(3)]
    assert [f.ranks for f in fold_outputs(outputs)] == [(0, 1, 2)]


def test_images_and_html_are_kept_as_they_are_behind_a_label():
    image = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}
    (folded,) = fold_outputs([(0, image), (1, dict(image))])
    label, data = folded.displays()
    assert label["text/plain"] == "[0-1]"
    assert "[0-1]" in label["text/html"]
    assert data == image


def test_one_rank_alone_has_no_label():
    (folded,) = fold_outputs([(0, {"text/html": "<b>x</b>", "text/plain": "x"})], labelled=False)
    assert folded.displays() == [{"text/html": "<b>x</b>", "text/plain": "x"}]


def error(rank, text, failed_at):
    lines = ("Traceback:", f"ValueError: {text}")
    return Outcome(rank, "error", 1.0, "ValueError", text, lines, line=3, failed_at=failed_at)


def test_equal_tracebacks_appear_once_and_the_first_failure_first():
    outcomes = [error(0, "b", 5.0), error(1, "a", 4.0), error(2, "b", 6.0), Outcome(3, "released"), Outcome(4, "ok")]
    assert fold_tracebacks(outcomes) == [
        ((1,), "On rank 1:\nTraceback:\nValueError: a"),
        ((0, 2), "On ranks 0,2:\nTraceback:\nValueError: b"),
    ]
    assert fold_tracebacks([error(0, "b", None)], labelled=False) == [((0,), "Traceback:\nValueError: b")]


def test_process_numbers_and_addresses_do_not_make_tracebacks_differ():
    outcomes = [error(r, f"/tmp/ipykernel_{70 + r}/1.py <X at 0x7f00{r:06x}>", None) for r in range(2)]
    assert [ranks for ranks, _ in fold_tracebacks(outcomes)] == [(0, 1)]
    outcomes = [error(r, f"pair.cc:553] Connection closed by peer [127.0.0.1]:{4000 + r}. GLHF", 1.0) for r in (0, 1)]
    assert [ranks for ranks, _ in fold_tracebacks(outcomes)] == [(0, 1)]
    assert cause_in_words(outcomes).startswith("ranks 0-1 failed")
