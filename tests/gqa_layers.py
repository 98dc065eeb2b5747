"""What tests read of layers whose attention they know."""

from copyengine.model_spec import GqaSpec, LayerSpec


def gqa_of(layer: LayerSpec) -> GqaSpec:
    """The grouped-query attention of `layer`, which has one."""
    assert isinstance(layer.attention, GqaSpec)
    return layer.attention
