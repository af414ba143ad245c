"""Text that comes piece by piece: together it is the text of the whole, and nothing is given out too early."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

from batchjobs.types import SamplingParams
from tests.support.cases import case
from workers.engine.text import StopMatcher, TextStream, Vocabulary

WORDS = ["the", "sea", "end", "e", "n", "d", "é", "你", "好", "😀", "\n", ".", "EN", "D", "STOP"]
PIECES = [*WORDS, *("▁" + word for word in WORDS), "▁", "▁▁", "▁▁a", "a"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x00, 0x41, 0x45, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken("<|unnamed|>", special=True)])
    backend.add_tokens([AddedToken("<tag>", special=False), AddedToken("é!", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, some characters and words as one token, and tokens that end within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    texts = [*WORDS, *(" " + word for word in WORDS)]
    longer = [piece for text in texts for piece, _ in spell(text)]
    longer += [spell("你")[0][0][:2], spell("😀")[0][0][1:], spell("a😀")[0][0][:3]]
    tokens = dict.fromkeys([*alphabet, *longer])
    backend = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def llama_like() -> PreTrainedTokenizerFast:
    """As sentencepiece models with byte fallback are converted."""
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate([*PIECES, *BYTES])}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend)


def metaspace() -> PreTrainedTokenizerFast:
    backend = Tokenizer(Unigram([(piece, -1.0) for piece in PIECES], unk_id=0, byte_fallback=False))
    backend.decoder = decoders.Metaspace()
    return wrapped(backend)


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = [*WORDS, "##s", "##ing", ",", "?"]
    backend = Tokenizer(WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="the"))
    backend.decoder = decoders.WordPiece()
    return wrapped(backend)


KINDS = {"byte-level": byte_level, "llama": llama_like, "metaspace": metaspace, "wordpiece": wordpiece}


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(KINDS[kind]())


@cache
def size(kind: str) -> int:
    return len(KINDS[kind]())


def answer(words: Vocabulary, ids: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """What the engine makes of these tokens: those up to a stop string, and the text."""
    if not sampling.stop:
        return ids, words.decode(ids)
    matcher = StopMatcher(sampling.stop, words, from_token=sampling.min_tokens)
    for count, token in enumerate(ids, start=1):
        if matcher.feed(token, count):
            return ids[:count], matcher.cut(words.decode(ids[:count]))
    return ids, words.decode(ids)


def streamed(words: Vocabulary, ids: list[int], text: str, sampling: SamplingParams) -> list[str]:
    stream = TextStream(words, sampling)
    return [*(stream.feed(token) for token in ids), stream.flush(text)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
@case("A-tok-04")
def test_the_pieces_together_are_the_text_decoded_at_once(kind: str, data: st.DataObject) -> None:
    """Also for ids that no tokenizer would write: halves of characters, special tokens, ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, size(kind) + 2), max_size=24))
    words = vocabulary(kind)
    pieces = streamed(words, ids, words.decode(ids), SamplingParams(max_tokens=64))
    assert "".join(pieces) == words.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace"])
@settings(max_examples=600, deadline=None)
@given(data=st.data())
@case("A-tok-06")
def test_with_stop_strings_the_pieces_together_are_the_text_before_the_match(kind: str, data: st.DataObject) -> None:
    words = vocabulary(kind)
    ids = data.draw(st.lists(st.integers(0, size(kind) + 2), max_size=24))
    # Stop strings that do occur: cuttings of the text of these or similar tokens.
    text = words.decode(ids) + " end STOP 你好 e"
    cuttings = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda cut: text[cut[0] :][: cut[1]])
    stops = data.draw(st.lists(cuttings, min_size=1, max_size=3))
    sampling = SamplingParams(max_tokens=64, stop=tuple(stops), min_tokens=data.draw(st.integers(0, 4)))
    taken, text = answer(words, ids, sampling)
    assert "".join(streamed(words, taken, text, sampling)) == text


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_long_random_answers(kind: str) -> None:
    words, chance = vocabulary(kind), random.Random(kind)
    for _ in range(20):
        ids = [chance.randrange(size(kind)) for _ in range(300)]
        assert "".join(streamed(words, ids, words.decode(ids), SamplingParams(max_tokens=300))) == words.decode(ids)


def test_a_piece_never_ends_within_a_character() -> None:
    words = vocabulary("byte-level")
    ids = [next(i for i in range(size("byte-level")) if words.bytes_of(i) == bytes([b])) for b in "a😀é".encode()]
    stream = TextStream(words, SamplingParams())
    assert [stream.feed(token) for token in ids] == ["a", "", "", "", "😀", "", "é"]
    assert stream.flush("a😀é") == ""


def ids_of(kind: str, *pieces: str) -> list[int]:
    tokenizer = KINDS[kind]()
    return [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def test_a_run_of_lone_bytes_is_held_back_until_it_is_over() -> None:
    """The decoder reads such a run as a whole: one more byte can make every character of it unreadable."""
    words = vocabulary("llama")
    ids = ids_of("llama", "a", "<0xE4>", "<0xBD>", "<0xA0>", "the")
    stream = TextStream(words, SamplingParams())
    assert [stream.feed(token) for token in ids] == ["a", "", "", "", "你the"]
    broken = ids_of("llama", "a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "the")
    assert words.decode(broken) == "a\ufffd\ufffd\ufffd\ufffdthe"
    assert "".join(streamed(words, broken, words.decode(broken), SamplingParams())) == words.decode(broken)


def test_what_may_become_a_stop_string_is_held_back_and_comes_when_it_does_not() -> None:
    words = vocabulary("metaspace")
    ids = ids_of("metaspace", "▁the", "▁e", "n", "e", "n", "d")
    stream = TextStream(words, SamplingParams(stop=(" end", "ende")))
    # "e" may begin "ende", then " e" may begin " end", and at last "end" may begin "ende".
    assert [stream.feed(token) for token in ids] == ["th", "e", "", " en", "", ""]
    assert stream.flush("the enend") == "end"


def test_a_complete_stop_string_and_what_follows_it_in_its_token_is_never_given_out() -> None:
    words = vocabulary("metaspace")
    sampling = SamplingParams(stop=("TO",))
    ids, text = answer(words, ids_of("metaspace", "▁the", "STOP", "▁sea"), sampling)
    assert (len(ids), text) == (2, "theS")
    assert streamed(words, ids, text, sampling) == ["the", "", "S"]


def test_stop_strings_before_min_tokens_are_text() -> None:
    """A match that ended too early is not found later, beside a longer stop string."""
    words = vocabulary("metaspace")
    sampling = SamplingParams(stop=("end", "something much longer"), min_tokens=3)
    ids, text = answer(words, ids_of("metaspace", "▁end", "▁the", "▁sea", "▁end", "▁the"), sampling)
    assert (len(ids), text) == (4, "end the sea ")
    assert "".join(streamed(words, ids, text, sampling)) == text


def test_a_stop_string_at_the_blank_that_the_decoder_drops() -> None:
    words = vocabulary("llama")
    sampling = SamplingParams(stop=(" end",))
    for pieces, wanted in (
        (("▁end",), ""),
        (("▁e", "n", "d"), ""),
        (("▁▁", "▁end"), " "),
        (("▁", "▁e", "n", "d"), ""),
    ):
        ids, text = answer(words, ids_of("llama", *pieces), sampling)
        assert text == wanted, pieces
        assert "".join(streamed(words, ids, text, sampling)) == wanted


def test_a_stop_string_after_unreadable_bytes_cuts_right_before_it() -> None:
    words = vocabulary("llama")
    sampling = SamplingParams(stop=("你", "END"))
    for pieces, wanted in (
        (("<0xFF>", "<0xE4>", "<0xBD>", "<0xA0>"), "\ufffd"),
        (("<0xE4>", "<0xBD>", "EN", "D"), "\ufffd\ufffd"),
        (("<0xE4>", "<0xBD>", "the", "<0xFF>", "<0xE4>", "<0xBD>", "<0xA0>"), "\ufffd\ufffdthe\ufffd"),
    ):
        ids, text = answer(words, ids_of("llama", *pieces), sampling)
        assert text == wanted, pieces
        assert "".join(streamed(words, ids, text, sampling)) == wanted


def test_an_added_token_is_spelled_as_the_decoder_reads_it() -> None:
    """The byte-level decoder takes the letters of an added token for bytes: this one is not readable."""
    words = vocabulary("byte-level")
    sampling = SamplingParams(stop=("é", "end"))
    ids, text = answer(words, ids_of("byte-level", "é!", "end"), sampling)
    assert (len(ids), text) == (2, "\ufffd!")
    assert "".join(streamed(words, ids, text, sampling)) == text


def test_special_tokens_show_in_no_piece_and_hold_nothing_back() -> None:
    words = vocabulary("byte-level")
    special = [words.special_id("<eos>"), *ids_of("byte-level", "<|unnamed|>")]
    assert None not in special
    the, sea = ids_of("byte-level", "the", "Ġsea")
    stream = TextStream(words, SamplingParams())
    assert [stream.feed(token) for token in (the, *special, sea)] == ["the", "", "", " sea"]  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_streams_empty_texts() -> None:
    stream = TextStream(Vocabulary(None), SamplingParams(stop=("x",)))
    assert [*map(stream.feed, range(5)), stream.flush("")] == [""] * 6


def test_text_comes_as_early_as_it_is_certain() -> None:
    """Plain words: each token's text comes with the token itself."""
    words = vocabulary("llama")
    ids = ids_of("llama", "▁the", "▁sea", ".", "\n", "▁end")
    pieces = streamed(words, ids, words.decode(ids), SamplingParams())
    assert pieces == ["the", " sea", ".", "\n", " end", ""]
    assert list(itertools.accumulate(pieces))[-1] == words.decode(ids)
