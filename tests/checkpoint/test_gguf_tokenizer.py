"""Tokenizers rebuilt from GGUF metadata, against transformers, tokenizers and sentencepiece."""

from __future__ import annotations

import functools
import io
import json
import pydoc_data.topics
from pathlib import Path

import gguf
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from edgepool.checkpoint.gguf_tokenizer import build_tokenizer, end_tokens
from edgepool.checkpoint.importer import open_source
from edgepool.errors import BadInput

from .models import TEXT, byte_level_tokenizer

PATH = Path("model.gguf")
TEXTS = [
    TEXT,
    "",
    " ",
    "  lead\n\n\ttabs  end  ",
    "It's 2024-12-31, they'll say 3.14159 and 1234567!",
    "IT'S THEY'LL ½ ² Ⅷ ٣٤ x86_64",
    "漢字かな🙂👩‍🚀 café naïve Łódź",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def metadata(pre: str = "gpt-2", **changes: object) -> dict[str, object]:
    """What a GGUF file says about the byte-level test tokenizer."""
    record = json.loads(byte_level_tokenizer().to_str())
    vocabulary = sorted(record["model"]["vocab"], key=record["model"]["vocab"].get)
    values: dict[str, object] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": vocabulary,
        "token_type": [3, 3, 3] + [1] * (len(vocabulary) - 3),
        "merges": [" ".join(merge) for merge in record["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    values.update(changes)
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def built(**options: object) -> Tokenizer:
    return Tokenizer.from_str(build_tokenizer(PATH, metadata(**options)))


# ------------------------------------------------------------------------------- byte level


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    source = open_source(smollm2_gguf)
    assert source.fields["bos_token_id"] == 1
    assert source.fields["eos_token_ids"] == (2, 0)  # <|im_end|>, <|endoftext|>
    assert source.fields["chat_template"].startswith("{% for message in messages %}")
    return Tokenizer.from_str(source.tokenizer)


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_gguf: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    # transformers does not know the `smollm` words; SmolLM2's tokenizer.json cuts out each digit
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in [*TEXTS, *list(pydoc_data.topics.topics.values())[:20]]:
        assert smollm2.encode(text).ids == theirs(text)["input_ids"], text[:60]


# SmolLM2's vocabulary has no token for some control bytes and for planes that hold no characters.
READABLE = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=("Cc", "Cs")))


@settings(deadline=None)
@given(text=READABLE)
def test_smollm2_returns_any_text(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text).ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_special_tokens_and_digits(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>").ids == [1]
    assert smollm2.encode("<|im_end|>").ids == [2]
    assert smollm2.encode("a1234").tokens == ["a", "1", "2", "3", "4"]
    assert smollm2.decode([1, 2]) == ""


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "deepseek-r1-qwen", "llama-bpe", "smaug-bpe"])
def test_words_equal_transformers(tmp_path: Path, pre: str) -> None:
    """The cut into words, as transformers knows it for each name."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata(pre, add_bos_token=False).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = built(pre=pre, add_bos_token=False)
    for text in [*TEXTS, *list(pydoc_data.topics.topics.values())[:10]]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text[:60]
        words = ours.pre_tokenizer.pre_tokenize_str(text)
        assert words == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)


def test_default_words() -> None:
    """llama.cpp's table: punctuation alone, then GPT-2's words, numbers in threes."""
    words = [w for w, _ in built(pre="default").pre_tokenizer.pre_tokenize_str("ab.cd 1234567")]
    assert words == ["ab", ".", "cd", "Ġ", "123", "456", "7"]


def test_qwen2_composes_characters() -> None:
    decomposed, composed = "cafe\u0301", "café"
    assert built(pre="qwen2").encode(decomposed).ids == built(pre="qwen2").encode(composed).ids
    tokenizer = built(pre="llama-bpe", add_bos_token=False)
    assert tokenizer.encode(decomposed).ids != tokenizer.encode(composed).ids


def test_llama3_takes_a_word_that_is_a_token_whole() -> None:
    """Even when no merges lead to it."""
    record = metadata("llama-bpe", add_bos_token=False)
    record["tokenizer.ggml.tokens"] = [*record["tokenizer.ggml.tokens"], "qqqq"]
    record["tokenizer.ggml.token_type"] = [*record["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer.from_str(build_tokenizer(PATH, record))
    assert tokenizer.encode("qqqq").tokens == ["qqqq"]
    record["tokenizer.ggml.pre"] = "smaug-bpe"
    tokenizer = Tokenizer.from_str(build_tokenizer(PATH, record))
    assert tokenizer.encode("qqqq").tokens == ["q"] * 4


@functools.cache
def reader(pre: str) -> Tokenizer:
    return built(pre=pre, add_bos_token=False)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "default"])
@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(pre: str, text: str) -> None:
    tokenizer = reader(pre)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bos_and_eos() -> None:
    assert built().encode("a").ids[0] != 1
    assert built(add_bos_token=True).encode("a").ids[0] == 1
    assert built(pre="llama-bpe").encode("a").ids[0] == 1  # llama.cpp's default for these words
    assert built(pre="llama-bpe", add_bos_token=False).encode("a").ids[0] != 1
    assert built(pre="llama-bpe", bos_token_id=None).encode("a").ids[0] != 1
    ids = built(add_bos_token=True, add_eos_token=True).encode("a", "b").ids
    assert ids == [1, *built().encode("a").ids, 2, 1, *built().encode("b").ids, 2]
    without = built(add_bos_token=True).encode("a", add_special_tokens=False).ids
    assert without == built().encode("a").ids


def test_token_types() -> None:
    """Control tokens are special; user-defined ones are whole, but ordinary text."""
    extra = ["<think>", "<tool>"]
    base = metadata()
    tokens = [*base["tokenizer.ggml.tokens"], *extra]
    kinds = [*base["tokenizer.ggml.token_type"], 4, 3]
    tokenizer = built(tokens=tokens, token_type=kinds)
    first = len(tokens) - 2
    assert tokenizer.encode("a<think>b<tool>").ids[1::2] == [first, first + 1]
    assert tokenizer.decode([first, first + 1]) == "<think>"


def test_end_tokens() -> None:
    assert end_tokens(PATH, metadata()) == (1, (2, 0))
    assert end_tokens(PATH, metadata(eot_token_id=5, eos_token_id=0)) == (1, (0, 5, 2))
    assert end_tokens(PATH, metadata(bos_token_id=None, eos_token_id=None)) == (None, (0, 2))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(model="rwkv"), "tokenizer 'rwkv' is not supported (supported: gpt2, llama)"),
        (dict(pre="tekken"), "pre-tokenizer 'tekken' is not supported (supported: smollm"),
        (dict(pre=None), "pre-tokenizer None is not supported"),
        (dict(tokens=None), "tokens is not a list of strings"),
        (dict(tokens=["a", "a"], token_type=[1, 1]), "lists a token twice"),
        (dict(token_type=[1]), "token_type does not list one kind per token"),
        (dict(merges=["a q"]), "the vocabulary makes no tokenizer"),
        (dict(merges=["zz"]), "the vocabulary makes no tokenizer"),
        (dict(merges=None), "merges is not a list of strings"),
        (dict(bos_token_id=-1, add_bos_token=True), "bos_token_id is -1"),
        (dict(model="llama"), "scores does not list one score per token"),
    ],
)
def test_faults_are_named(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_tokenizer(PATH, metadata(**changes))
    assert expected in str(caught.value)
    assert str(PATH) in str(caught.value)


# ------------------------------------------------------------------------------- sentencepiece


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with the settings of Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(pydoc_data.topics.topics.values())[:8]),
        model_writer=model,
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.999,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def piece_metadata(trained: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    """As llama.cpp's converter writes a SentencePiece model."""

    def kind(i: int) -> int:
        if trained.is_unknown(i):
            return 2
        if trained.is_control(i):
            return 3
        return 6 if trained.is_byte(i) else 1

    ids = range(trained.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [trained.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": trained.bos_id(),
        "tokenizer.ggml.eos_token_id": trained.eos_id(),
        "tokenizer.ggml.unknown_token_id": trained.unk_id(),
    }


@pytest.fixture(scope="module")
def pieces(trained: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    return Tokenizer.from_str(build_tokenizer(PATH, piece_metadata(trained)))


PIECE_TEXT = st.text(st.sampled_from("abcdefiklmnoprstuwxyz    .,()\"'_0123456789\n\tAÉé漢🙂"))


@settings(max_examples=300, deadline=None)
@example(text="  two  spaces and\nlines, 12345 – 漢字🙂 ")
@example(text=TEXT)
@given(text=PIECE_TEXT)
def test_pieces_equal_sentencepiece(
    trained: sentencepiece.SentencePieceProcessor, pieces: Tokenizer, text: str
) -> None:
    ids = trained.encode(text)
    assert pieces.encode(text, add_special_tokens=False).ids == ids
    assert pieces.decode(ids) == trained.decode(ids)


def test_pieces_and_special_tokens(trained: sentencepiece.SentencePieceProcessor) -> None:
    record = piece_metadata(trained)
    tokenizer = Tokenizer.from_str(build_tokenizer(PATH, record))
    assert tokenizer.encode("the").ids == [trained.bos_id(), *trained.encode("the")]
    expected = [*trained.encode("the"), trained.eos_id(), *trained.encode("the")]
    assert tokenizer.encode("the</s>the", add_special_tokens=False).ids == expected
    record["tokenizer.ggml.add_space_prefix"] = False
    record["tokenizer.ggml.add_bos_token"] = False
    tokenizer = Tokenizer.from_str(build_tokenizer(PATH, record))
    assert tokenizer.encode("the").tokens[0][0] != "▁"
    record["tokenizer.ggml.remove_extra_whitespaces"] = True
    with pytest.raises(BadInput, match="remove_extra_whitespaces"):
        build_tokenizer(PATH, record)
