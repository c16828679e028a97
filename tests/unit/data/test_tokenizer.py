import pytest
from tiny_models import make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.data.tokenizer import LostCharacters, check_token_ids, load_tokenizer
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import TokenizerConfig


def settings(path, chat_template=None) -> TokenizerConfig:
    return TokenizerConfig(name=str(path), chat_template=chat_template, chat_template_kwargs=None)


def test_a_saved_tokenizer_comes_back_and_the_configured_template_replaces_its_own(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(settings(tmp_path)).chat_template == make_tokenizer().chat_template
    for own in (None, "default", "Default"):
        assert load_tokenizer(settings(tmp_path, own)).chat_template == make_tokenizer().chat_template
    mine = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "mine.jinja").write_text(f"\ufeff{mine}")
    for given in (mine, str(tmp_path / "mine.jinja")):
        tokenizer = load_tokenizer(settings(tmp_path, given))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False) == "[q]"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mine", "'mine' has no Jinja expression"),
        ("", "has no Jinja expression"),
        ("none.jinja", "none.jinja cannot be read: No such file or directory"),
        ("latin.jinja", r"latin\.jinja is not UTF-8 text \(byte 3\)"),
        ("empty.jinja", r"empty\.jinja' has no Jinja expression"),
    ],
)
def test_what_is_no_template_is_refused_instead_of_standing_for_every_prompt(tmp_path, monkeypatch, given, message):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "latin.jinja").write_bytes(b"{{ \xe9")
    (tmp_path / "empty.jinja").write_text("messages")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(settings(tmp_path, given))
    assert "\n" not in str(error.value)


def test_padding_falls_back_to_the_end_token(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(settings(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id


def test_a_folder_without_a_tokenizer_is_an_error_of_one_line(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*; set policy\.tokenizer\.name") as error:
        load_tokenizer(settings(tmp_path))
    assert "\n" not in str(error.value)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="no tokenizer can be loaded from"):
        load_tokenizer(settings(tmp_path))


def test_a_tokenizer_without_a_chat_template_or_an_end_is_an_error(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(settings(tmp_path / "endless"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match="no chat template"):
        load_tokenizer(settings(tmp_path / "bare"))


def test_tokens_that_the_model_has_no_embedding_for_are_refused_where_rows_have_them():
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    words = [[1, 2], [], [size - 1]]
    check_token_ids(tokenizer, words, None)
    check_token_ids(tokenizer, words, size + 1)
    check_token_ids(tokenizer, words, size)  # as that of Gemma 3, which knows images
    with pytest.raises(DataError, match=rf"makes token {size} \('<image>'\), but the model has embeddings for {size}"):
        check_token_ids(tokenizer, [*words, [size]], size)
    tokenizer.pad_token = "<image>"
    with pytest.raises(DataError, match=rf"or save the model with model.resize_token_embeddings\({size + 1}\)"):
        check_token_ids(tokenizer, words, size)


VOCABULARY = {"a": 0, "b": 1, "c": 2, " ": 3, "<unk>": 4}
NORMALIZER = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])


@pytest.mark.parametrize(
    ("kind", "lost"), [("dropped", "z 猫"), ("unknown", "z 猫"), ("bytes", None), ("unknown is the end", "z 猫")]
)
def test_characters_that_vanish_are_told_once_and_changes_of_form_are_not(caplog, kind, lost):
    unknown = {"unk_token": "<unk>"} if kind.startswith("unknown") else {}
    made = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], **unknown))
    made.normalizer, made.decoder = NORMALIZER, decoders.Fuse()
    if kind == "bytes":
        letters = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
        made = Tokenizer(models.BPE(vocab=letters, merges=[]))
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    end = {"eos_token": "<unk>"} if kind.endswith("end") else {}
    characters = LostCharacters(PreTrainedTokenizerFast(tokenizer_object=made, **unknown, **end))
    for text, origin in (("ABC \uff41", "d:1"), ("áb\tc z 猫 z", "d:2"), ("猫", "d:3")):
        characters.look(text, origin)
    characters.tell()
    told = [message for message in caplog.messages if "loses characters" in message]
    assert len(told) == (lost is not None)
    assert lost is None or (f"never sees: {lost} (first in d:2)" in told[0])
