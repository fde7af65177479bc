"""Tokenizers of Hugging Face folders: exact bytes and texts of both kinds, and their settings."""

import json

import gguf
import pytest
import tokenizers
from suites.toy_gguf import TOY_MERGES, TOY_SPECIAL
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from models.checkpoints import GgufFile
from models.tokenizer import Tokenizer, byte_alphabet
from paged_jax.text_stream import TextStream

TEXTS = [
    "",
    " ",
    "hello  hello",
    " hello\n\thello ",
    "Ünïcödé 速い 👩‍👩‍👧‍👦 e\u0301 \x00\x7f",
    "a</s>b <s>",
    "<0x0A> ▁ literal",
]
PIECES = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello", "hello", "▁▁"]
VOCABULARY = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(256)), *PIECES]
MERGES = [("h", "e"), ("l", "l"), ("▁", "he"), ("ll", "o"), ("▁he", "llo"), ("he", "llo")]
MERGES += [("▁", "▁")]


def sentencepiece(*, prefix=True, form="replace"):
    """As transformers writes Llama 2's (``prefix``) and Gemma's."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    model = models.BPE(ids, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    first = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if form == "metaspace":
        scheme = "first" if prefix else "never"
        steps = [decoders.Metaspace(prepend_scheme=scheme), decoders.ByteFallback()]
    elif prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return backend


def byte_level():
    tokens = [*TOY_SPECIAL, *byte_alphabet(), *(pair.replace(" ", "") for pair in TOY_MERGES)]
    ids = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, [tuple(m.split(" ")) for m in TOY_MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(TOY_SPECIAL)
    return backend


KINDS = {
    "byte_level": byte_level,
    "llama2": sentencepiece,
    "gemma": lambda: sentencepiece(prefix=False),
    "metaspace": lambda: sentencepiece(form="metaspace"),
}


def write(folder, backend, **settings):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


WITH_SPACE = ("llama2", "metaspace")


@pytest.mark.parametrize("kind", KINDS)
class TestBytes:
    def test_texts_come_back(self, tmp_path, kind):
        tokenizer = Tokenizer.load(write(tmp_path, KINDS[kind]()))
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == KINDS[kind]().encode(text, add_special_tokens=False).ids
            expected = text if kind == "byte_level" else text.replace("▁", " ")
            if kind in WITH_SPACE:  # a special token begins a new text, with its own space
                expected = expected.replace("</s>", "</s> ")
            assert tokenizer.decode(ids) == expected

    def test_streamed_text_is_the_bytes_joined(self, tmp_path, kind):
        tokenizer = Tokenizer.load(write(tmp_path, KINDS[kind]()))
        for text in TEXTS:
            ids = tokenizer.encode(text)
            stream = TextStream(tokenizer.token_bytes)
            deltas = "".join([*map(stream.push, ids), stream.finish()])
            assert deltas == b"".join(map(tokenizer.token_bytes, ids)).decode()
            text_alone = deltas.removeprefix(" ") if kind in WITH_SPACE else deltas
            assert tokenizer.decode(ids) == text_alone

    def test_decode_is_the_librarys(self, tmp_path, kind):
        backend = KINDS[kind]()
        tokenizer = Tokenizer.load(write(tmp_path, backend))
        for text in ("hello", " hello", "hello hello", "Ж", "hello</s>"):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)

    def test_saved_and_loaded_it_is_the_same(self, tmp_path, kind):
        tokenizer = Tokenizer.load(write(tmp_path / "a", KINDS[kind](), bos_token="<s>"))
        (tmp_path / "b").mkdir()
        tokenizer.save(tmp_path / "b")
        again = Tokenizer.load(tmp_path / "b")
        assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(t) for t in TEXTS]
        assert [again.token_bytes(i) for i in range(again.vocab_size)] == [
            tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]


def test_bytes_of_each_sort_of_token(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, sentencepiece()))
    for token, expected in (
        ("▁hello", b" hello"),
        ("<0x0A>", b"\n"),
        ("<0xE9>", b"\xe9"),
        ("</s>", b"</s>"),
        ("▁▁", b"  "),
    ):
        assert tokenizer.token_bytes(VOCABULARY.index(token)) == expected


def test_a_part_of_a_character_waits(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, sentencepiece(prefix=False)))
    stream = TextStream(tokenizer.token_bytes)
    assert [stream.push(token) for token in tokenizer.encode("速a")[:3]] == ["", "", "速"]


def test_ids_of_the_model_that_are_no_tokens_have_no_text(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, sentencepiece()), num_ids=300)
    assert tokenizer.token_bytes(299) == b""
    with pytest.raises(ValueError, match=r"token_id=300 must lie in \[0, 300\)"):
        tokenizer.token_bytes(300)


class TestBeginning:
    """Whether a text begins with the beginning token."""

    @staticmethod
    def processed(backend):
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        return backend

    @pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "lstrip": False}])
    @pytest.mark.parametrize(
        ("is_processed", "settings", "expected"),
        [
            (False, {}, False),
            (True, {}, True),
            (False, {"add_bos_token": True}, True),
            (True, {"add_bos_token": False}, False),
            (True, {"add_bos_token": None}, True),
            (False, {"add_bos": True}, True),  # written by earlier versions
        ],
    )
    def test_what_says_so(self, tmp_path, bos, is_processed, settings, expected):
        backend = self.processed(sentencepiece()) if is_processed else sentencepiece()
        tokenizer = Tokenizer.load(write(tmp_path, backend, bos_token=bos, **settings))
        ids = tokenizer.encode("hello")
        assert (ids[0] == 1) == expected
        assert tokenizer.encode("<s>hello").count(1) == 1

    def test_the_map_of_special_tokens_is_read(self, tmp_path):
        folder = write(tmp_path, self.processed(sentencepiece()))
        assert Tokenizer.load(folder).encode("hello")[0] != 1  # no token is named
        (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
        assert Tokenizer.load(folder).encode("hello")[0] == 1


class TestSettings:
    MESSAGES = ({"role": "user", "content": "hi"},)

    @pytest.mark.parametrize(
        "template",
        ["{{ eos_token }}", [{"name": "tool_use", "template": "x"},
                             {"name": "default", "template": "{{ eos_token }}"}]],
    )  # fmt: skip
    def test_templates(self, tmp_path, template):
        eos = {"content": "</s>"}
        folder = write(tmp_path, byte_level(), eos_token=eos, chat_template=template)
        assert Tokenizer.load(folder).apply_chat_template(self.MESSAGES) == "</s>"
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        assert Tokenizer.load(folder).apply_chat_template(self.MESSAGES) == "hi"

    def test_added_tokens_of_the_settings(self, tmp_path):
        size = byte_level().get_vocab_size()
        added = {str(size): {"content": "<|tool|>", "special": True, "normalized": False}}
        folder = write(tmp_path, byte_level(), added_tokens_decoder=added)
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.encode("<|tool|>") == [size]
        assert tokenizer.token_bytes(size) == b"<|tool|>"
        write(tmp_path, byte_level(), added_tokens_decoder={str(size + 9): added[str(size)]})
        with pytest.raises(ValueError, match=rf"'<\|tool\|>' cannot be token {size + 9}"):
            Tokenizer.load(folder)

    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            (tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), "model 'WordPiece'"),
            (tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "model 'WordLevel'"),
            (tokenizers.Tokenizer(models.BPE({"a": 0}, [])), "model 'BPE' with decoder None"),
        ],
    )
    def test_other_kinds_are_refused_with_their_names(self, tmp_path, backend, message):
        with pytest.raises(
            ValueError, match=rf"tokenizer\.json: {message}.* must be byte-level BPE"
        ):
            Tokenizer.load(write(tmp_path, backend))


class TestGguf:
    """SentencePiece's vocabulary and scores, as GGUF files hold them."""

    @staticmethod
    def metadata(**changes):
        ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(MERGES)}
        types = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": gguf.TokenType.CONTROL}
        types |= {"</s>": gguf.TokenType.CONTROL}
        types |= dict.fromkeys(VOCABULARY[3:259], gguf.TokenType.BYTE)
        values = {
            "model": "llama",
            "tokens": VOCABULARY,
            "scores": [ranks.get(token, -1000.0) for token in VOCABULARY],
            "token_type": [int(types.get(token, gguf.TokenType.NORMAL)) for token in VOCABULARY],
            "merges": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}

    @pytest.mark.parametrize("prefix", [True, False])
    def test_ids_are_those_of_the_merges(self, write_gguf, prefix):
        changes = self.metadata(add_space_prefix=prefix, add_bos_token=False)
        tokenizer = Tokenizer.from_gguf(GgufFile(write_gguf(metadata=changes)))
        backend = sentencepiece(prefix=prefix)
        for text in TEXTS:
            assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.decode(tokenizer.encode("hello Ж")) == "hello Ж"

    def test_texts_begin_with_the_beginning_token_unless_it_says_no(self, write_gguf):
        tokenizer = Tokenizer.from_gguf(GgufFile(write_gguf(metadata=self.metadata())))
        assert tokenizer.encode("hello")[0] == 1

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"scores": [1.0, 2.0]}, r"scores has 2 entries, expected 271"),
            ({"tokens": ["x"] * 271}, r"a token for every byte, '<0x00>' is missing"),
        ],
    )
    def test_lists_that_do_not_fit_are_refused(self, write_gguf, changes, message):
        file = GgufFile(write_gguf(metadata=self.metadata(**changes)))
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_gguf(file)
