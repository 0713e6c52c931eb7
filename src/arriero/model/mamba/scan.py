"""The state-space scan of Mamba-2 (SSD) in chunks, and its causal convolution, in plain PyTorch.

The recurrence of a head with rate A is S_t = exp(dt_t A) S_{t-1} + dt_t x_t b_t^T and y_t = S_t c_t. Inside
a chunk it is a masked matmul; between chunks only the states are passed on, so that memory is linear in the
length. `document` numbers the documents of packed sequences: a state never
passes into another document.
Shapes: B batch, T tokens, H heads, P head dim, G groups, N state size, M chunks, Q tokens of a chunk, K taps.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# tokens of a chunk at most: larger ones need more multiplications, smaller ones more states
CHUNK = 128
# chunks whose states are passed on by one matmul
_STATES = 16


class ScanInputs(NamedTuple):
    """What a scan reads: values, step sizes in fp32, the negative rate of each head in fp32, the two
    projections of each group, and the numbers of documents if sequences are packed."""

    x_BTHP: Tensor
    dt_BTH: Tensor
    rate_H: Tensor
    b_BTGN: Tensor
    c_BTGN: Tensor
    document_BT: Tensor | None = None


def chunked_scan(inputs: ScanInputs, chunk: int) -> tuple[Tensor, Tensor]:
    """Return y of all tokens, and the states after the last one in fp32.

    Uncompiled, the backward pass recomputes the scan: it would else keep several matrices of Q x Q for each
    head; the compiler recomputes what is cheap by itself.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return _scan(inputs, chunk)
    return checkpoint(_scan, inputs, chunk, use_reentrant=False, preserve_rng_state=False)


def _scan(inputs: ScanInputs, chunk: int) -> tuple[Tensor, Tensor]:
    x_BTHP, dt_BTH, rate_H, b_BTGN, c_BTGN, document_BT = inputs
    tokens, groups, dtype = x_BTHP.shape[1], b_BTGN.shape[2], x_BTHP.dtype
    chunk = min(chunk, tokens)
    # padding keeps the state: its input is zero and its decay is one
    scaled_BTHP = (x_BTHP * dt_BTH[..., None]).to(dtype)
    x, a, b, c = (_chunks(each, chunk) for each in (scaled_BTHP, dt_BTH * rate_H, b_BTGN, c_BTGN))
    document_BMQ = None if document_BT is None else _chunks(document_BT, chunk, repeat=True)
    x_BMGRQP = x.unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    b_BMGQN, c_BMGQN = b.transpose(2, 3), c.transpose(2, 3)
    sums_BMGRQ = a.unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2).cumsum(-1)

    scores_BMGQQ = c_BMGQN @ b_BMGQN.transpose(-1, -2)
    mask_BMQQ = _mask(chunk, document_BMQ, x.device)[:, :, None, None]
    weights = scores_BMGQQ.unsqueeze(3) * _decays(sums_BMGRQ, mask_BMQQ)
    y_BMGRQP = weights.to(dtype) @ x_BMGRQP

    left_BMGRQ = (sums_BMGRQ[..., -1:] - sums_BMGRQ).exp()
    if document_BMQ is not None:
        left_BMGRQ = left_BMGRQ * (document_BMQ == document_BMQ[..., -1:])[:, :, None, None]
    states_BMGSN = (x_BMGRQP * left_BMGRQ.to(dtype)[..., None]).transpose(-1, -2).flatten(3, 4) @ (
        b_BMGQN.to(dtype)
    )
    passed_BMHPN = states_BMGSN.float().unflatten(3, (-1, x.shape[-1])).flatten(2, 3)
    last_BM = None if document_BMQ is None else document_BMQ[..., -1]
    passed_BMHPN = _pass_on(passed_BMHPN, sums_BMGRQ[..., -1].flatten(2), last_BM)

    before_BMHPN = F.pad(passed_BMHPN[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    before_BMGSN = before_BMHPN.to(dtype).unflatten(2, (groups, -1)).flatten(3, 4)
    from_before = (c_BMGQN @ before_BMGSN.transpose(-1, -2)).unflatten(-1, (-1, x.shape[-1])).transpose(3, 4)
    into_BMGRQ = sums_BMGRQ.exp()
    if document_BMQ is not None and last_BM is not None:
        entered = document_BMQ == F.pad(last_BM[:, :-1], (1, 0), value=-1)[..., None]
        into_BMGRQ = into_BMGRQ * entered[:, :, None, None]
    y_BMGRQP = y_BMGRQP + from_before * into_BMGRQ.to(dtype)[..., None]
    y_BTHP = y_BMGRQP.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :tokens]
    return y_BTHP, passed_BMHPN[:, -1]


def _chunks(x_BT: Tensor, chunk: int, repeat: bool = False) -> Tensor:
    """Divide the tokens into chunks; the last one is padded with zeros, or repeats its last value."""
    missing = -x_BT.shape[1] % chunk
    if missing and repeat:
        x_BT = torch.cat((x_BT, x_BT[:, -1:].expand(-1, missing)), dim=1)
    elif missing:
        x_BT = F.pad(x_BT, (0, 0) * (x_BT.ndim - 2) + (0, missing))
    return x_BT.unflatten(1, (-1, chunk))


def _mask(size: int, document_BMQ: Tensor | None, device: torch.device) -> Tensor:
    """Return which earlier items of a chunk each one depends on, itself included."""
    causal_11QQ = torch.ones(size, size, dtype=torch.bool, device=device).tril()[None, None]
    if document_BMQ is None:
        return causal_11QQ
    return causal_11QQ & (document_BMQ[..., None] == document_BMQ[..., None, :])


def _decays(sums: Tensor, mask: Tensor) -> Tensor:
    """Return exp of the sums of a over (j, i] for i after j, from running sums; zero outside of the mask."""
    return (sums[..., None] - sums[..., None, :]).masked_fill(~mask, -torch.inf).exp()


def _pass_on(states_BMHPN: Tensor, a_BMH: Tensor, document_BM: Tensor | None) -> Tensor:
    """Return the state after each chunk from what each chunk alone adds to it and from its decay.

    Blocks of chunks are passed on by a matmul, then blocks of blocks, so that memory stays linear.
    """
    chunks, block = states_BMHPN.shape[1], min(_STATES, states_BMHPN.shape[1])
    states, a = (_chunks(each, block) for each in (states_BMHPN, a_BMH))
    document = None if document_BM is None else _chunks(document_BM, block, repeat=True)
    sums_BMHQ = a.transpose(-1, -2).cumsum(-1)
    decays = _decays(sums_BMHQ, _mask(block, document, states.device)[:, :, None])
    states_BMHQS = states.transpose(2, 3).flatten(-2)
    within = decays @ states_BMHQS
    if chunks > block:
        last = None if document is None else document[..., -1]
        ends = within[..., -1, :].unflatten(-1, states_BMHPN.shape[-2:])
        after = _pass_on(ends, sums_BMHQ[..., -1], last).flatten(-2)
        before = F.pad(after[:, :-1], (0, 0, 0, 0, 1, 0))[..., None, :]
        into = sums_BMHQ.exp()
        if document is not None and last is not None:
            into = into * (document == F.pad(last[:, :-1], (1, 0), value=-1)[..., None])[:, :, None]
        within = within + before * into[..., None]
    out = within.unflatten(-1, states_BMHPN.shape[-2:]).transpose(2, 3).flatten(1, 2)
    return out[:, :chunks]


def scan_step(state_BHPN: Tensor, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return y of one token and the next state, in fp32."""
    x_BHP, dt_BH, b_BGN, c_BGN = (
        each[:, 0] for each in (inputs.x_BTHP, inputs.dt_BTH, inputs.b_BTGN, inputs.c_BTGN)
    )
    heads = x_BHP.shape[1] // b_BGN.shape[1]
    b, c = (each.float().repeat_interleave(heads, dim=1) for each in (b_BGN, c_BGN))
    added = (x_BHP.float() * dt_BH[..., None])[..., None] * b[:, :, None]
    state_BHPN = state_BHPN * (dt_BH * inputs.rate_H).exp()[..., None, None] + added
    return (state_BHPN * c[:, :, None]).sum(-1).to(x_BHP.dtype)[:, None], state_BHPN


def causal_conv(
    x_BTC: Tensor,
    taps_CK: Tensor,
    bias_C: Tensor | None,
    document_BT: Tensor | None,
    before_BKC: Tensor | None,
) -> Tensor:
    """Return the convolution of each channel with its taps, the last of which is for the token itself.

    `before` are the K-1 inputs before the first token; they are zero if there are none.
    """
    tokens, taps = x_BTC.shape[1], taps_CK.shape[1]
    padded = F.pad(x_BTC, (0, 0, taps - 1, 0)) if before_BKC is None else torch.cat((before_BKC, x_BTC), 1)
    out = x_BTC * taps_CK[:, -1]
    for back in range(1, taps):
        start = taps - 1 - back
        earlier = padded[:, start : start + tokens]
        if document_BT is not None:
            same = document_BT == F.pad(document_BT, (back, 0), value=-1)[:, :tokens]
            earlier = earlier * same[..., None]
        out = out + earlier * taps_CK[:, -1 - back]
    return out if bias_C is None else out + bias_C
