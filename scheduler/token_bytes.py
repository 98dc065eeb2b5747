"""The bytes that a token stands for, also where they are part of a character. Pure."""

import re

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def _alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write each byte as: itself if it prints, else one from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def token_bytes(name: str | None, text: str) -> bytes:
    """Of the token that its vocabulary calls `name` and whose text is `text`.

    Only a part of a character needs the name: then it is that of a byte, or written in the alphabet of byte-level
    vocabularies. Where it is neither the bytes are those of the text.
    """
    if name is not None and _UNFINISHED in text:
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
    return text.encode()
