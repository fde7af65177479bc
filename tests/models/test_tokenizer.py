"""The tokenizer: built from a GGUF file, exact bytes, chat templates, and golden ids."""

import json
import os
from pathlib import Path

import pytest

from models.checkpoints import GgufFile
from models.tokenizer import Tokenizer, byte_alphabet
from paged_jax import model as paged_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden_smollm2.json"

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024-01-31 and 3.14159 < 1,000,000.",
    "def f(x: int) -> int:\n\treturn x ** 2  # square\n\n\n    if x:\n        pass\n",
    "tabs\t\tand   runs    of spaces \r\n and trailing   ",
    "Ünïcödé, naïve façade, Straße",
    "Съешь же ещё этих мягких французских булок",
    "速い茶色の狐は怠け者の犬を飛び越える。你好世界",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก 안녕하세요",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b zero-width, \ufeff mark",
    "<|im_start|>user\nhi<|im_end|>\n",
    "٠١٢٣ ½ ² Ⅷ 1234567890",
    "\x00nul \x1b[0m \x7f \x85",
    "".join(map(chr, range(0x20, 0x180))),
]


@pytest.fixture
def toy(write_gguf):
    return Tokenizer.from_gguf(GgufFile(write_gguf()))


def joined(tokenizer, ids):
    return b"".join(map(tokenizer.token_bytes, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_of_texts_and_bytes(toy, text):
    ids = toy.encode(text)
    assert toy.decode(ids) == text
    assert joined(toy, ids) == text.encode()


def test_merges_digits_and_special_tokens(toy):
    def tokens(text):
        return [toy.token_bytes(token_id) for token_id in toy.encode(text)]

    assert tokens("hell tt") == [b"hell", b" t", b"t"]
    assert tokens("12") == [b"1", b"2"]  # digits stand alone, although a merge "1 2" exists
    assert tokens("<|im_end|>t") == [b"<|im_end|>", b"t"]


def test_it_is_the_librarys_tokenizer_protocol(toy):
    assert isinstance(toy, paged_model.Tokenizer)


def test_decode_and_bytes_agree_on_broken_characters(toy):
    ids = toy.encode("é€😀")
    for end in range(len(ids)):
        assert toy.decode(ids[:end]) == joined(toy, ids[:end]).decode("utf-8", "replace")


def test_save_and_load(toy, tmp_path):
    toy.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "hello 12 <|im_start|> Ж"
    assert loaded.encode(text) == toy.encode(text)
    assert loaded.chat_template == toy.chat_template
    assert loaded.vocab_size == toy.vocab_size


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "there is none; .*save_pretrained"),
        ("tokenizer.json", '{"version"', "it is damaged: .*line 1"),
        ("tokenizer.json", "{}", "it has no 'model'"),
        ("tokenizer.json", '{"model": {"type": "Odd"}}', "."),
        ("tokenizer_config.json", '{"version"', "it is damaged: .*line 1"),
        ("tokenizer_config.json", "[]", "it must be a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "3 must be a token's text"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template=3 must be text"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "."),
        ("special_tokens_map.json", "nonsense", "it is damaged: .*line 1"),
    ],
)
def test_a_damaged_file_is_named(toy, tmp_path, name, content, reason):
    toy.save(tmp_path)
    path = tmp_path / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: expected a tokenizer file.* {reason}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_unknown_id_has_no_bytes(toy, token_id):
    with pytest.raises(
        ValueError, match=rf"token_id={token_id} must lie in \[0, {toy.vocab_size}\)"
    ):
        toy.token_bytes(token_id)


def test_the_byte_alphabet_is_a_bijection():
    assert len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord(" ")] == "Ġ"
    assert byte_alphabet()[ord("\n")] == "Ċ"


def test_a_beginning_token_is_added_once(write_gguf):
    file = GgufFile(write_gguf(metadata={"tokenizer.ggml.add_bos_token": True}))
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.encode("t") == [0, *tokenizer.encode("<|im_start|>t")[1:]]
    assert tokenizer.encode("<|im_start|>").count(0) == 1
    assert tokenizer.encode("") == [0]


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("gpt-2", "12", [b"12"]),
        ("llama-bpe", "he12", [b"he", b"12"]),
        ("smollm", "12", [b"1", b"2"]),
    ],
)
def test_pre_tokenizers(write_gguf, kind, text, pieces):
    tokenizer = Tokenizer.from_gguf(GgufFile(write_gguf(metadata={"tokenizer.ggml.pre": kind})))
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"model='bert' must be 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, r"expected the metadata key 'tokenizer\.ggml\.scores'"),
        ({"tokenizer.ggml.pre": "mystery"}, r"pre='mystery' must be 'smollm'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"token_type has 2 entries, expected 263"),
        ({"tokenizer.ggml.merges": ["no such"]}, r"merges must join tokens"),
        ({"tokenizer.ggml.merges": ["nospace"]}, r"merges must join tokens"),
        ({"tokenizer.ggml.tokens": ["▁a"], "tokenizer.ggml.token_type": [1]}, "'▁a' must consist"),
        ({"tokenizer.ggml.eos_token_id": 9999}, r"eos_token_id=9999 must lie in \[0, 263\)"),
        ({"tokenizer.ggml.tokens": None}, r"expected the metadata key 'tokenizer\.ggml\.tokens'"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(write_gguf, metadata, message):
    file = GgufFile(write_gguf(metadata=metadata))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(file)


class TestChatTemplate:
    MESSAGES = ({"role": "user", "content": "hi"},)

    def test_renders(self, toy):
        rendered = "<|im_start|>user\nhi<|im_end|>\n"
        assert toy.apply_chat_template(self.MESSAGES, add_generation_prompt=False) == rendered
        assert toy.apply_chat_template(self.MESSAGES) == rendered + "<|im_start|>assistant\n"

    def test_without_a_template(self, write_gguf):
        file = GgufFile(write_gguf(metadata={"tokenizer.chat_template": None}))
        with pytest.raises(ValueError, match="this model has no chat template"):
            Tokenizer.from_gguf(file).apply_chat_template(self.MESSAGES)

    def test_the_templates_own_refusal(self, toy):
        with pytest.raises(ValueError, match="no tools"):
            toy.apply_chat_template([{"role": "tool", "content": "x"}])

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages[0].update({'role': 'x'}) }}",
            "{% if %}",
        ],
    )
    def test_a_hostile_or_broken_template_is_contained(self, write_gguf, template):
        file = GgufFile(write_gguf(metadata={"tokenizer.chat_template": template}))
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(ValueError, match="must be what the chat template expects"):
            Tokenizer.from_gguf(file).apply_chat_template(messages)
        assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.weights
class TestRealTokenizer:
    @pytest.mark.parametrize("text", TEXTS)
    def test_round_trip(self, smollm2, text):
        ids = smollm2.tokenizer.encode(text)
        assert smollm2.tokenizer.decode(ids) == text
        assert joined(smollm2.tokenizer, ids) == text.encode()

    def test_golden_ids_and_texts(self, smollm2):
        tokenizer = smollm2.tokenizer
        for item in json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]:
            assert tokenizer.encode(item["text"]) == item["prompt_ids"]
            assert tokenizer.decode(item["greedy_ids"]) == item["greedy_text"]
            ids = item["greedy_ids"]
            assert joined(tokenizer, ids).decode("utf-8", "replace") == item["greedy_text"]

    def test_every_token_has_bytes(self, smollm2):
        tokenizer = smollm2.tokenizer
        assert tokenizer.vocab_size == smollm2.spec.vocab_size
        assert all(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))

    def test_bytes_that_the_vocabulary_lacks_are_dropped(self, smollm2):
        tokenizer = smollm2.tokenizer
        lacking = "\x04\x06\x13\x14\x16\x1d"
        assert tokenizer.decode(tokenizer.encode(f"a{lacking}b")) == "ab"
        others = "".join(chr(code) for code in range(0x20) if chr(code) not in lacking)
        assert tokenizer.decode(tokenizer.encode(others)) == others

    def test_the_golden_chat_prompt(self, smollm2):
        golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["items"]
        text = next(item["text"] for item in golden if "haiku about the sea" in item["text"])
        messages = [{"role": "user", "content": "Write a haiku about the sea."}]
        assert smollm2.tokenizer.apply_chat_template(messages) == text

    def test_more_texts_named_by_the_environment(self, smollm2):
        """A JSON-lines file with a ``text`` in each line, in ``$PAGED_JAX_PROMPTS``."""
        if "PAGED_JAX_PROMPTS" not in os.environ:
            pytest.skip("PAGED_JAX_PROMPTS names no file")
        lines = Path(os.environ["PAGED_JAX_PROMPTS"]).read_text(encoding="utf-8").splitlines()
        for text in (json.loads(line)["text"] for line in lines):
            ids = smollm2.tokenizer.encode(text)
            assert smollm2.tokenizer.decode(ids) == text
            assert joined(smollm2.tokenizer, ids) == text.encode()
