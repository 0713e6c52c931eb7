"""Print the table of docs/federation.md with the network cost of a round."""

from collections.abc import Iterator

from arriero.federate.cost import RoundCost, parse_rate

_METHODS = (("FedAvg bf16", "bf16", False), ("DiLoCo int8", "int8", False), ("streaming int8", "int8", True))
_MODELS = (("8B", 8_030_261_248, 7.9), ("70B", 70_553_706_496, 69.0))
_STEPS = 500


def documented() -> Iterator[str]:
    """Yield the rows of the table in docs/federation.md."""
    yield "| model | sites | link | method | per round | transfer | share of the round | least H under 5 % |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, parameters, step_s in _MODELS:
        for sites in (2, 8, 64):
            for link in ("1 Gbit/s", "10 Gbit/s"):
                for method, codec, overlaps in _METHODS:
                    cost = RoundCost(parameters, sites, parse_rate(link), codec, step_s, _STEPS, overlaps)
                    size, hours = f"{cost.bytes / 1e9:,.0f} GB", f"{cost.transfer_s / 60:,.0f} min"
                    row = (
                        model,
                        sites,
                        link,
                        method,
                        size,
                        hours,
                        f"{cost.share:.1%}",
                        f"{cost.least_steps:,}",
                    )
                    yield f"| {' | '.join(map(str, row))} |"


if __name__ == "__main__":
    print("\n".join(documented()))
