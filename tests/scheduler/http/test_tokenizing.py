"""/tokenize, /detokenize and what is served, against the tokenizer itself."""

from importlib import metadata
from pathlib import Path

from tokenizers import Tokenizer

from scheduler.http.tokenizing import MEASURED
from tests.scheduler.http.rig import MODEL, serving
from tests.scheduler.rig import on_loop, write_model
from tests.scheduler.test_tokenize import write


def test_texts_become_tokens_and_tokens_texts(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    async def main() -> None:
        async with serving(model) as rig:
            for text in ("the quick", "naïve café 🦊", "", "<|user|>x"):
                ids = tokenizer.encode(text).ids
                reply = await rig.post("/tokenize", prompt=text, model=MODEL)
                assert reply.json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
                assert (await rig.post("/detokenize", tokens=ids)).json() == {"prompt": text}
            assert (await rig.post("/detokenize", tokens=[1] * 4096)).status_code == 200
            chat = [{"role": "user", "content": "the fox"}]
            reply = await rig.post("/tokenize", messages=chat)
            assert reply.json()["tokens"] == tokenizer.encode("<|user|>the fox", add_special_tokens=False).ids

    on_loop("selector", main)


def test_what_is_wrong_is_named(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            for path, body, status, words in (
                ("/tokenize", {}, 400, "exactly one"),
                ("/tokenize", {"prompt": "a", "messages": []}, 400, "exactly one"),
                ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
                ("/tokenize", {"prompt": "a", "model": "other"}, 404, "other"),
                ("/tokenize", {"prompt": "a", "x": 1}, 400, "x is not supported"),
                ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens[1] = 99999"),
                ("/detokenize", {"tokens": [1] * 4097}, 400, "tokens has 4097 ids, at most 4096"),
                ("/detokenize", {"tokens": [-1]}, 400, "tokens[0] = -1"),
                ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
                ("/detokenize", {"tokens": [1], "model": "other"}, 404, "other"),
            ):
                reply = await rig.post(path, **body)
                assert reply.status_code == status and words in reply.json()["error"]["message"], body

    on_loop("selector", main)


def test_a_text_may_be_too_long_for_a_request_but_not_without_end(model: Path) -> None:
    """It is not encoded then: a word of the vocabulary's longest token's length is one token."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    longest = max(map(len, tokenizer.get_vocab()))

    async def main() -> None:
        async with serving(model) as rig:
            most = MEASURED * 4096 * longest
            for count, status in ((most, 200), (most + 1, 400)):
                for body in ({"prompt": "x" * count}, {"messages": [{"role": "user", "content": "x" * (count - 8)}]}):
                    reply = await rig.post("/tokenize", **body)
                    assert reply.status_code == status
                    if status == 400:
                        error = reply.json()["error"]
                        assert (error["param"], error["code"]) == (next(iter(body)), "context_length_exceeded")
                        assert f"more than {MEASURED * 4096} tokens" in error["message"]

    on_loop("selector", main)


def test_a_tokenizer_that_adds_tokens_adds_them_unless_told_not_to(tmp_path: Path) -> None:
    write(write_model(tmp_path), post_processor=True)

    async def main() -> None:
        async with serving(tmp_path) as rig:
            without = (await rig.post("/tokenize", prompt="a", add_special_tokens=False)).json()["tokens"]
            start = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|start|>")
            for added in (True, None):
                reply = await rig.post("/tokenize", prompt="a", add_special_tokens=added)
                assert reply.json()["tokens"] == [start, *without]

    on_loop("selector", main)


def test_what_is_served(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            (listed,) = (await rig.http.get("/v1/models")).json()["data"]
            assert listed == {
                "id": MODEL,
                "object": "model",
                "created": rig.front.created_s,
                "owned_by": "slotstream",
                "max_model_len": 4096,
            }
            assert (await rig.http.get(f"/v1/models/{MODEL}")).json() == listed
            assert (await rig.http.get("/version")).json() == {"version": metadata.version("slotstream")}

    on_loop("selector", main)
