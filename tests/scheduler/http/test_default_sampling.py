"""generation_config.json, against hand-written defaults."""

from pathlib import Path

import pytest

from copyengine.wire.errors import ConfigError
from scheduler.http.default_sampling import DefaultSampling, read_default_sampling


def test_what_is_stated_is_the_default(tmp_path: Path) -> None:
    assert read_default_sampling(tmp_path) == DefaultSampling(1.0, 1.0, 0, 0.0, 1.0)
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "eos_token_id": [1, 2]}'
    (tmp_path / "generation_config.json").write_text(text, "utf-8")
    assert read_default_sampling(tmp_path) == DefaultSampling(temperature=0.6, top_k=20)


@pytest.mark.parametrize("stated", ['{"temperature": "warm"}', '{"top_p": 0}', '{"top_k": 1.5}', '{"min_p": -1}'])
def test_what_is_no_setting_refuses_the_start(tmp_path: Path, stated: str) -> None:
    (tmp_path / "generation_config.json").write_text(stated, "utf-8")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_default_sampling(tmp_path)
