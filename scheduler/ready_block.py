"""The Ready block: what a person needs to know once the engine serves."""

import time

import psutil

from copyengine.checkpoint.model import Model
from copyengine.placement import Placement
from copyengine.wire.lifecycle import Ready
from scheduler.check import REPEATED
from scheduler.client import DEFAULT_ENDPOINT

VERIFIED = "every expert is compared with what was loaded before it is computed with (--verify-copies)"

Facts = dict[str, str | int | float | bool]


def ready_block(
    model: Model, placement: Placement, ready: Ready, endpoint: str, url: str = "", asks_for_key: bool = False
) -> str:
    """What a person needs to know once the engine serves; `url` is the HTTP front's, if there is one, and
    `asks_for_key` whether it takes only requests with a key, which is never shown."""
    facts = ready.facts
    age_s = time.time() - psutil.Process().create_time()
    shares = "; slots and KV are each one's, the experts are shared" if int(facts["workers"]) > 1 else ""
    weights = "; random weights: the text means nothing" if model.random_weights else ""
    kv_where = " of pinned host memory" if placement.gpus and facts["kv_placement"] == "host" else ""
    lines = {
        "endpoint": endpoint,
        **({"HTTP": f"{url}/v1", "live page": f"{url}/"} if url else {}),
        "model": f"{facts['model']} ({model.spec.architecture}, {facts['dtype']}{weights})",
        "workers": f"{facts['workers']} on {facts['device']}{shares}",
        "device": f"{placement.device}, {placement.reason}",
        **expert_lines(placement, facts),
        "KV": f"{facts['kv_tokens']} tokens, {_mb(facts['kv_nbytes'])}{kv_where}; one request may take "
        f"{facts['max_model_len']}",
        **state_lines(facts),
        **({"answers": REPEATED} if facts["deterministic"] else {}),
        "event loop": facts["event_loop"],
        "try": _client_command(endpoint),
        **({"": _curl_command(url, asks_for_key)} if url else {}),
    }
    return f"Ready in {age_s:.1f} s\n" + "\n".join(f"  {key:<12}{value}" for key, value in lines.items())


def state_lines(facts: Facts) -> dict[str, str]:
    """The Ready block's line about recurrent states, if the model has any."""
    if not facts["state_slots"]:
        return {}
    return {
        "states": f"{facts['state_slots']} recurrent states, of requests and snapshots; {_mb(facts['state_nbytes'])}"
    }


def expert_lines(placement: Placement, facts: Facts) -> dict[str, str]:
    """The Ready block's lines about experts."""
    because = f": {placement.copy_engine_reason}" if placement.copy_engine_reason else ""
    layers, experts, demand = facts["moe_layers"], facts["experts"], facts["demand_tokens"]
    if not layers:
        return {"experts": "none: a dense model, so that there is nothing to load on demand"}
    memory = bank_memory(placement, facts)
    threshold = f"prefill chunks of up to {demand} tokens load only the experts they route to"
    return {
        "slots": f"{facts['slots']} of {int(layers) * int(experts)} experts, and {facts['stream_slots']} to stream "
        f"through; {_mb(facts['pool_nbytes'])}; {facts['cache_policy']} decides who makes way",
        "experts": f"{layers} layers x {experts}, {facts['experts_per_token']} per token; {memory}, "
        f"copied by a {facts['copy_engine']}{because}",
        "demand": threshold if demand else "off: every prefill chunk streams all experts",
        **({"checks": VERIFIED} if facts["verify_copies"] else {}),
    }


def bank_memory(placement: Placement, facts: Facts) -> str:
    """How much of which memory the experts lie in."""
    total, pinned = int(facts["bank_nbytes"]), int(facts["pinned_nbytes"])
    if not placement.gpus:
        return f"{_mb(total)} of shared memory"
    if pinned == total:
        return f"{_mb(total)} of pinned memory"
    return (
        f"{_mb(total)} of host memory, of which only {_mb(pinned)} could be pinned: {_mb(total - pinned)} are pageable "
        "and take longer to copy"
    )


def _mb(nbytes: str | float) -> str:
    return f"{float(nbytes) / 1e6:,.1f} MB"


def _client_command(endpoint: str) -> str:
    where = "" if endpoint == DEFAULT_ENDPOINT else f"--endpoint {endpoint} "
    return f'python -m scheduler.client {where}"Once upon a time"'


def _curl_command(url: str, asks_for_key: bool) -> str:
    body = '{"prompt": "Once upon a time", "max_tokens": 64}'
    key = "-H 'Authorization: Bearer KEY' " if asks_for_key else ""
    return f"curl {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'"
