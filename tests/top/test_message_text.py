"""How messages word what is many."""

from __future__ import annotations

from dist_ckpt.message_text import MAX_LISTED, listed, merge_similar, ranks_text, remedy_of_parts


def test_ranks_are_written_as_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([7, 1, 0, 2, 2]) == "ranks 0-2, 7"


def test_of_very_many_ranks_the_first_are_named() -> None:
    assert ranks_text(range(16_384)) == "ranks 0-16383"
    assert ranks_text(range(0, 16_384, 2)).endswith(", 36, 38, and 8172 more")


def test_of_many_texts_the_first_are_named_and_the_others_counted() -> None:
    texts = [str(number) for number in range(MAX_LISTED + 3)]
    assert listed(texts[:2]) == "0, 1"
    assert listed(texts[:MAX_LISTED], "; ").endswith("; 19")
    assert listed(texts, "; ").endswith("; 19; and 3 more")


def test_of_messages_that_are_alike_the_first_is_told_and_the_others_are_counted() -> None:
    missing = [f"/ck/model-{n:05}.safetensors is missing; it holds w{n}, b" for n in range(94)]
    other = "/ck/model-00007.safetensors of rank 7 is truncated: 100 of 78,928 bytes"
    assert merge_similar([*missing, other]) == [f"{missing[0]} (and 93 more like it)", other]
    assert merge_similar(missing[:3]) == missing[:3]  # all of them are as short


def test_an_optimizers_own_dict_is_not_to_be_kept_per_rank() -> None:
    for name in ("optim.state.0.exp_avg: on rank 0", "state.12.step", "a.optim.state.3"):
        assert "pass the optimizer itself" in remedy_of_parts(["rng", name], "wrap it")
    for name in ("states.0.weight", "optim.state.layers.0.weight.exp_avg", "estate.1"):
        assert remedy_of_parts([name], "wrap it") == "wrap it"
