"""The bytes of tokens, against the texts that they were made from."""

from tokenizers import Tokenizer, decoders, models

from scheduler.token_bytes import token_bytes
from tests.scheduler.rig import CORPUS, train_tokenizer


def test_byte_level_tokens_add_up_to_the_text() -> None:
    """Every byte, and characters of two to four."""
    tokenizer = train_tokenizer(CORPUS)
    text = "a\x00\x7f\n é\u0100語🦊 <|end|>" + "".join(map(chr, range(0x80, 0x180)))
    parts = [
        token_bytes(tokenizer.id_to_token(token), tokenizer.decode([token], skip_special_tokens=False))
        for token in tokenizer.encode(text, add_special_tokens=False).ids
    ]
    assert b"".join(parts) == text.encode() and len(parts) > 100


def test_tokens_that_are_bytes() -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<0x00>"))
    tokenizer.decoder = decoders.ByteFallback()
    for name, byte in vocabulary.items():
        assert token_bytes(name, tokenizer.decode([byte])) == bytes([byte])


def test_what_has_a_text_has_its_bytes() -> None:
    assert token_bytes("\u0120é", " é") == " é".encode()
    assert token_bytes(None, "") == b""
    assert token_bytes("語", "\ufffd") == "\ufffd".encode()
