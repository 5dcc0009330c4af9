"""Which modules a plan looks at: layers, and the parts of each."""

from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from recompute_scan.record.arrange import Chosen, candidates


class Part(nn.Module):
    """Anything made of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


class Layer(nn.Module):
    """Parts under these names, and a norm that is none."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        for name, part in parts.items():
            self.add_module(name, part)


class Encoder(nn.Module):
    """One of its layers alone is what `covered` may hold, so that no other test's model counts."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.mine = nn.ModuleList(layers)


def chosen_of(layers: Sequence[nn.Module], *covered: nn.Module) -> list[Chosen]:
    """What is chosen of this model; other tests' models may be alive."""
    model = Encoder(layers)
    inner = {id(part) for part in model.modules()}
    return [one for one in candidates(covered)[0] if id(one.module) in inner]


def parts_of(layers: Sequence[nn.Module]) -> list[str]:
    """The names of the parts."""
    return [one.name for one in chosen_of(layers) if one.part_of >= 0]


def test_attention_and_mlp_are_parts() -> None:
    layers = [Layer(attention=Part(), mlp=Part()) for _ in range(2)]
    names = [f"mine.{n}.{name}" for n in range(2) for name in ("attention", "mlp")]
    assert parts_of(layers) == names
    assert [one.name for one in chosen_of(layers) if one.part_of < 0] == ["mine.0", "mine.1"]


def test_parts_in_a_list_of_the_layer() -> None:
    """As T5 has them."""
    layers = [Layer(layer=nn.ModuleList(Part() for _ in range(3))) for _ in range(2)]
    assert parts_of(layers) == [f"mine.{n}.layer.{part}" for n in range(2) for part in range(3)]


def test_parts_of_what_an_adapter_is_around() -> None:
    layers = [Layer(base=Layer(attention=Part(), mlp=Part())) for _ in range(2)]
    assert parts_of(layers) == [
        f"mine.{n}.base.{part}" for n in range(2) for part in ("attention", "mlp")
    ]


@pytest.mark.parametrize("number", [1, 4])
def test_one_is_no_half_and_many_are_none(number: int) -> None:
    """One part stands for itself; its own layers are no parts."""
    layers = [Layer(**{f"part{n}": Part() for n in range(number)}) for _ in range(2)]
    assert parts_of(layers) == (["mine.0.part0", "mine.1.part0"] if number == 1 else [])


def test_a_part_of_two_layers_belongs_to_neither() -> None:
    shared = Part()
    layers = [Layer(attention=Part(), mlp=shared) for _ in range(2)]
    assert parts_of(layers) == ["mine.0.attention", "mine.1.attention"]


def test_what_is_checkpointed_today() -> None:
    """A part's own checkpoint is not its layer's, and what is deeper counts for the layer."""
    parts = [Part() for _ in range(4)]
    layers = [Layer(attention=part, mlp=Part()) for part in parts]
    chosen = chosen_of(layers, parts[0], layers[1], parts[2].up)
    assert [one.name for one in chosen if one.checkpointed] == [
        "mine.1",
        "mine.2",
        "mine.0.attention",
    ]
