import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.core.format import checksums


def test_the_digests_of_known_bytes_never_change():
    assert checksums.block_digest(b"") == "2d06800538d394c2"
    assert checksums.block_digest(b"dist_ckpt") == "846400e3802fa690"
    assert checksums.document_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert checksums.document_digest(b"dist_ckpt") == "53757003e2eab8510dedb2a943990b02"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_has_the_digest_of_its_bytes(kind):
    assert checksums.block_digest(kind(b"abc")) == checksums.block_digest(b"abc")
    assert len(checksums.block_digest(kind(b"abc"))) == checksums.BLOCK_DIGEST_CHARS
    assert len(checksums.document_digest(kind(b"abc"))) == 32


@given(st.binary(min_size=1, max_size=64), st.data())
def test_one_flipped_bit_changes_both_digests(data, draw):
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksums.block_digest(flipped) != checksums.block_digest(data)
    assert checksums.document_digest(flipped) != checksums.document_digest(data)


@given(st.integers(0, 100), st.integers(1, 20))
def test_blocks_follow_each_other_and_only_the_last_is_short(nbytes, block_nbytes):
    spans = list(checksums.blocks(nbytes, block_nbytes))
    assert len(spans) == checksums.num_blocks(nbytes, block_nbytes)
    assert [n for span in spans for n in range(span.start, span.stop)] == [*range(nbytes)]
    assert all(span.nbytes == block_nbytes for span in spans[:-1])


def test_an_empty_shard_has_no_blocks():
    assert checksums.num_blocks(0) == 0
    assert list(checksums.blocks(0)) == []


@given(st.lists(st.binary(max_size=40)))
def test_a_block_that_comes_in_parts_has_the_same_digest(parts):
    streamed = checksums.streamed_digest()
    for part in parts:
        streamed.update(part)
    assert streamed.hexdigest() == checksums.block_digest(b"".join(parts))
