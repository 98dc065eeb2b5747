"""What a start can be refused for before anything is started: checks of the settings alone, and of the port."""

import ipaddress
import tempfile
from pathlib import Path

import zmq

from copyengine.wire.errors import ConfigError
from scheduler.config import ServingConfig

LEAST_MODEL_LEN = 2
"""A prompt token and an answer token."""


def listen_endpoint(config: ServingConfig) -> str:
    """Where to listen. ConfigError unless the host is an IPv4 loopback address."""
    host = "127.0.0.1" if config.host == "localhost" else config.host
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"--host {config.host}: must be a loopback address such as 127.0.0.1; there is no access control, "
            "so reach it from elsewhere through an SSH tunnel"
        )
    return f"tcp://{host}:{config.port}"


def check_port(config: ServingConfig) -> None:
    """ConfigError if the scheduler could not listen now. A socket of the kind it will use says so."""
    endpoint = listen_endpoint(config)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another --port") from None


def check_stats_file(config: ServingConfig) -> None:
    """ConfigError if --collect-stats names a file that cannot be written; makes nothing."""
    if not config.collect_stats:
        return
    path = Path(config.collect_stats).resolve()
    if path.is_dir():
        raise ConfigError(f"--collect-stats {path}: is a directory; name a file in it")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--collect-stats {path}: is a device or the like, which would be replaced; name a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part"):
            pass
    except OSError as error:
        raise ConfigError(f"--collect-stats {path}: cannot be written: {error.strerror}") from None


def max_model_len(config: ServingConfig, positions: int, kv_tokens: int) -> int:
    """Prompt and answer tokens of one request. ConfigError if more are asked for than the model or the KV holds."""
    asked = config.max_model_len
    if min(asked or positions, positions, kv_tokens) < LEAST_MODEL_LEN:
        raise ConfigError(
            f"--max-model-len {asked or min(positions, kv_tokens)}: a prompt token and an answer token need "
            f"{LEAST_MODEL_LEN}; raise --max-model-len and --kv-tokens"
        )
    if asked > positions:
        raise ConfigError(f"--max-model-len {asked}: the model has {positions} positions; use no more, or 0 for all")
    if asked > kv_tokens:
        raise ConfigError(
            f"--max-model-len {asked}: the KV pages hold {kv_tokens} tokens; raise --kv-tokens or lower --max-model-len"
        )
    return asked or min(positions, kv_tokens)
