"""The matrix as a table for people: Markdown, and one HTML file that needs nothing else."""

from collections.abc import Iterator, Sequence
from html import escape

from arriero.bench.matrix import MODELS, SMALL_SEQ_LEN, SMALL_SEQUENCES, Cell, Matrix
from arriero.bench.result import Result

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #d5d9e0; --dim: #5d6675; --bad: #b3261e; --bar: #3b7dd8;
  --back: #ffffff; --text: #1a1d23; --head: #f3f5f8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --line: #363c47; --dim: #9aa4b4; --bad: #ff8a80;
  --bar: #5f9bea; --back: #14171c; --text: #e6e9ee; --head: #1d2128; }} }}
body {{ background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin: 2.2rem 0 .3rem; }}
p, .note {{ color: var(--dim); margin: .3rem 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin: .6rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ border: 1px solid var(--line); padding: .45rem .7rem; text-align: left; vertical-align: top; }}
th {{ background: var(--head); font-weight: 600; white-space: nowrap; }}
td b {{ font-size: 1.05rem; white-space: nowrap; }}
td small {{ display: block; color: var(--dim); }}
td.bad {{ color: var(--bad); font-size: .85rem; overflow-wrap: anywhere; }}
td.none {{ color: var(--dim); font-size: .85rem; }}
.bar {{ height: 4px; background: var(--bar); border-radius: 2px; margin: .25rem 0; }}
</style>
</head>
<body>
"""


def markdown(matrix: Matrix) -> str:
    parts = [f"# {_title(matrix)}\n", *(f"\n{line}\n" for line in _about(matrix))]
    layouts, modes = _kept(matrix, "layout"), _kept(matrix, "mode")
    for model in _kept(matrix, "model"):
        parts.append(f"\n## {model}\n{_work_words(matrix, model)}\n\n")
        parts += [f"| | {' | '.join(layouts)} |\n", f"|---|{'---|' * len(layouts)}\n"]
        for mode in modes:
            cells = [_in_markdown(matrix.of(model, layout, mode)) for layout in layouts]
            parts.append(f"| {mode} | {' | '.join(cells)} |\n")
    return "".join(parts)


def html(matrix: Matrix) -> str:
    parts = [_HEAD.format(title=escape(_title(matrix))), f"<h1>{escape(_title(matrix))}</h1>\n"]
    parts += [f"<p>{escape(line)}</p>\n" for line in [*_about(matrix), "Bars compare the speed per rank."]]
    layouts, modes = _kept(matrix, "layout"), _kept(matrix, "mode")
    for model in _kept(matrix, "model"):
        fastest = max((c.result.timing.tokens_per_s / c.ranks for c in _done(matrix, model)), default=1.0)
        heads = "".join(f"<th>{escape(layout)}</th>" for layout in layouts)
        parts.append(f"<h2>{escape(model)}</h2>\n<p>{escape(_work_words(matrix, model))}</p>\n")
        parts.append(f'<div class="wide"><table>\n<tr><th></th>{heads}</tr>\n')
        for mode in modes:
            cells = (_in_html(matrix.of(model, layout, mode), fastest) for layout in layouts)
            parts.append(f"<tr><th>{escape(mode)}</th>{''.join(cells)}</tr>\n")
        parts.append("</table></div>\n")
    parts.append(f"<h2>How MFU is counted</h2>\n{_conventions(matrix)}</body>\n</html>\n")
    return "".join(parts)


def _title(matrix: Matrix) -> str:
    return "Training speed: layouts and modes" + (", small models on a CPU" if matrix.small else "")


def _about(matrix: Matrix) -> Iterator[str]:
    done = [cell.result for cell in matrix.cells if cell.result]
    failed = sum(cell.failed for cell in matrix.cells)
    waiting = len(matrix.cells) - len(done) - failed
    yield (
        f"{len(done)} of {len(matrix.cells)} cells ran, {failed} failed, {waiting} need more GPUs. "
        f"{matrix.time}"
    )
    if done:
        result = done[0]
        timed = len(result.timing.step_ms)
        yield (
            f"{result.device.name}, {result.device.cpu}; torch {result.code.versions['torch']}, "
            f"arriero {result.code.versions['arriero']} at {(result.code.commit or 'no commit')[:10]}"
            f"{' with changes' if result.code.dirty else ''}. "
            f"Tokens per second of all ranks at the median of {timed} steps after "
            f"{result.timing.warmup_steps}; data, clipping, optimizer and logging are timed."
        )
    if matrix.small:
        yield (
            "These are small sisters: family and grouping of heads are the model's, layers are few and "
            f"narrow, {SMALL_SEQUENCES} sequences of {SMALL_SEQ_LEN} tokens a rank. They show that every "
            "combination works; their speed says nothing about the models."
        )
    yield "A cell has a speed only if its mode's losses on a small model were those of fp32, within bounds."


def _work_words(matrix: Matrix, model: str) -> str:
    chosen, done = MODELS[model], _done(matrix, model)
    if not done:
        return f"{chosen.sequences} x {chosen.seq_len} tokens a rank"
    work = done[0].result.work
    spec = work.model
    sequences = done[0].result.micro_batch
    weights = f"{work.master} weights, {work.optimizer_state} {work.optimizer} states"
    tokens = f"{matrix.accumulate} x {sequences} x {work.seq_len} tokens a rank"
    return (
        f"{work.parameters:,} parameters ({spec['layers']} layers of {spec['dim']}, {spec['heads']} heads, "
        f"{spec['kv_heads']} of keys), {tokens}; {weights}"
    )


class _Done(Cell):
    """One that has a result."""

    result: Result


def _done(matrix: Matrix, model: str) -> list[_Done]:
    return [_Done(**dict(c)) for c in matrix.cells if c.model == model and c.result is not None]


def _kept(matrix: Matrix, field: str) -> Sequence[str]:
    return list(dict.fromkeys(getattr(cell, field) for cell in matrix.cells))


def _in_markdown(cell: Cell | None) -> str:
    if cell is None or cell.result is None:
        return (cell.problem if cell else "").replace("|", "\\|")[:300]
    return f"{cell.result.timing.tokens_per_s:,.0f} tok/s, {', '.join(_details(cell.result))}"


def _in_html(cell: Cell | None, fastest: float) -> str:
    if cell is None or cell.result is None:
        problem = cell.problem if cell else ""
        kind = "bad" if cell and cell.failed else "none"
        return f'<td class="{kind}">{escape(problem[:300])}</td>'
    speed = cell.result.timing.tokens_per_s
    bar = f'<div class="bar" style="width:{100 * speed / cell.ranks / fastest:.0f}%"></div>'
    details = "".join(f"<small>{escape(each)}</small>" for each in _details(cell.result))
    return f"<td><b>{speed:,.0f} tok/s</b>{bar}{details}</td>"


def _details(result: Result) -> Iterator[str]:
    timing, rate = result.timing, result.rate("causal")
    yield f"{timing.median_ms:,.1f} ms ({timing.lower_quartile_ms:,.1f}-{timing.upper_quartile_ms:,.1f})"
    yield f"{result.memory.allocated_gib:.2f} GiB"
    if rate.mfu is not None:
        yield f"MFU {rate.mfu:.1%}"
    if rate.mfu_of_float8_peak is not None:
        yield f"{rate.mfu_of_float8_peak:.1%} of the float8 peak"
    if result.gate.needed and result.gate.holds is None:
        yield "loss not judged"


def _conventions(matrix: Matrix) -> str:
    done = next((cell.result for cell in matrix.cells if cell.result), None)
    if done is None:
        return "<p>Nothing ran.</p>"
    rows = "".join(
        f"<tr><td>{escape(rate.convention)}</td><td>{escape(rate.formula)}</td></tr>" for rate in done.rates
    )
    return f"<p>The tables show the first; each result holds all.</p><table>{rows}</table>\n"
