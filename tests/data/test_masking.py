"""Document masking, label masks and prompts, judged by the loss of real models."""

from itertools import chain, pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from arriero.data.order.loader import IGNORED, Loader
from arriero.data.order.order import EvalStream
from arriero.data.order.packing import Packing, TokenSource
from arriero.data.store.loss_mask import attach_loss_masks, attach_prompt_lengths
from arriero.errors import UserError
from arriero.model.family import build_model
from arriero.model.presets import resolve

SEQ_LEN = 24
LENGTHS = [5, 1, 24, 9, 14, 3, 0, 50, 2, 11, 24, 6]


@pytest.fixture(scope="module", params=["llama-test", "gpt2-test"])
def model(request):
    model = build_model(resolve(request.param, {"vocab_size": 300, "layers": 2}))
    model.init_weights(1)
    return model.double().eval()


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(2)
    return [generator.integers(1, 300, length).tolist() for length in LENGTHS]


@torch.no_grad()
def alone(model, tokens, labels):
    """The summed loss of one sequence by itself."""
    logits = model(torch.tensor([tokens]))[0]
    return F.cross_entropy(logits, torch.tensor(labels), ignore_index=IGNORED, reduction="sum").item()


@torch.no_grad()
def packed(model, source, packing, mask=True, sequences=3):
    total = 0.0
    with Loader(EvalStream([source], SEQ_LEN, packing), sequences, documents=mask) as loader:
        for batch in loader:
            logits = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT).flatten(0, 1)
            labels = batch.labels_BT.flatten()
            total += F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
    return total


def parts(document, prompt=(), own_prompt=0):
    """A document as rows of at most SEQ_LEN, each with the labels it should have."""
    whole = [*prompt, *document] if document else []
    unincluded = len(prompt) + own_prompt
    labels = [*(t if i >= unincluded else IGNORED for i, t in enumerate(whole))][1:]
    labels.append(IGNORED)
    return [(whole[i : i + SEQ_LEN], labels[i : i + SEQ_LEN]) for i in range(0, len(whole), SEQ_LEN)]


@pytest.mark.parametrize("kind", ["bestfit", "none"])
@pytest.mark.parametrize("prompt", [(), (7, 9, 8)])
def test_packed_documents_have_the_loss_of_each_document_alone(
    model, documents, make_store, tmp_path, kind, prompt
):
    source = TokenSource(make_store([documents]), prompt=prompt)
    expected = sum(alone(model, *part) for document in documents for part in parts(document, prompt))
    assert packed(model, source, Packing(kind, cache=tmp_path)) == pytest.approx(expected, rel=1e-9)


def test_the_documents_of_a_window_have_the_loss_of_each_document_alone(model, documents, make_store):
    """A window may begin and end inside a document; its first part counts positions from the window on."""
    store = make_store([documents])
    flat = [t for document in documents for t in document]
    starts = set(np.cumsum([0, *LENGTHS]).tolist())
    expected = 0.0
    for begin in range(0, (len(flat) - 1) // SEQ_LEN * SEQ_LEN, SEQ_LEN):
        edges = [begin, *sorted(s for s in starts if begin < s < begin + SEQ_LEN), begin + SEQ_LEN]
        for a, b in pairwise(edges):
            last = IGNORED if b in starts else flat[b]
            expected += alone(model, flat[a:b], [*flat[a + 1 : b], last])
    assert packed(model, TokenSource(store), Packing()) == pytest.approx(expected, rel=1e-9)


def test_without_the_mask_documents_see_each_other(model, documents, make_store, tmp_path):
    source, packing = TokenSource(make_store([documents])), Packing("bestfit", cache=tmp_path)
    assert packed(model, source, packing, mask=False) != pytest.approx(
        packed(model, source, packing), rel=1e-4
    )


@pytest.mark.parametrize("kind", ["concat", "bestfit", "none"])
def test_a_documents_own_prompt_is_read_but_excluded_from_the_loss(
    model, documents, make_store, tmp_path, kind
):
    """By prompt lengths and by a mask over the same tokens, which are written and read in different ways."""
    lengths = [min(3, n) for n in LENGTHS]
    one, two = (make_store([documents[:7], documents[7:]]) for _ in range(2))
    prompted = attach_prompt_lengths(one.directory, [lengths[:7], lengths[7:]])
    included = [[i >= p for i in range(n)] for n, p in zip(LENGTHS, lengths, strict=True)]
    masked = attach_loss_masks(two.directory, [list(chain(*included[:7])), list(chain(*included[7:]))])
    packing = Packing(kind, cache=tmp_path)
    loss = packed(model, TokenSource(prompted), packing)
    assert packed(model, TokenSource(masked), packing) == pytest.approx(loss, rel=1e-12)
    assert loss < 0.95 * packed(model, TokenSource(make_store([documents])), packing)
    if kind != "concat":
        expected = sum(
            alone(model, *part)
            for document, n in zip(documents, lengths, strict=True)
            for part in parts(document, own_prompt=n)
        )
        assert loss == pytest.approx(expected, rel=1e-9)


def test_the_loss_does_not_depend_on_what_a_prompt_should_be(model, documents, make_store, tmp_path):
    """Perturbing the logits that predict prompt tokens leaves the loss as it was; others change it."""
    source = TokenSource(make_store([documents]), prompt=(7, 9, 8))
    stream = EvalStream([source], SEQ_LEN, Packing("bestfit", cache=tmp_path))
    with Loader(stream, 4, documents=True) as loader:
        batch = next(loader)
    logits = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT).detach().requires_grad_()
    F.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=IGNORED).backward()
    matters = logits.grad.abs().sum(-1) > 0
    tokens, following = batch.tokens_BT[:, :-1], batch.tokens_BT[:, 1:]
    inside_prompt = ((tokens == 7) & (following == 9)) | ((tokens == 9) & (following == 8))
    assert inside_prompt.sum() > 4
    assert not matters[:, :-1][inside_prompt].any()
    assert matters.sum() == (batch.labels_BT != IGNORED).sum() > 20


def test_label_files_belong_to_the_fingerprint_and_are_checked(make_store):
    store = make_store([[[1, 2, 3], [4, 5]]])
    before = store.fingerprint
    with_prompts = attach_prompt_lengths(store.directory, [[1, 0]])
    again = attach_prompt_lengths(store.directory, [[2, 0]])
    assert len({before, with_prompts.fingerprint, again.fingerprint}) == 3
    with pytest.raises(UserError, match="has 2 documents, and 3 values"):
        attach_prompt_lengths(store.directory, [[1, 0, 0]])
    with pytest.raises(UserError, match="has 5 tokens, and 4 values"):
        attach_loss_masks(store.directory, [[True] * 4])
    (store.directory / "00000.plen").unlink()
    with (
        pytest.raises(UserError, match=r"00000\.plen is missing"),
        Loader(EvalStream([TokenSource(again)], 2), 1) as loader,
    ):
        next(loader)
