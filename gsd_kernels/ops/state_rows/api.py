from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from . import compiled, reference
from .window import StateWindow

ROWS = implementations_of("state_rows", cpu=compiled, reference=reference)
COMMIT = implementations_of("state_commit", cpu=compiled, reference=reference)
FLOAT, INT = (torch.float32,), (torch.int32,)


def state_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    parents: Tensor,
    depths: Tensor,
    lengths: Tensor,
    window: StateWindow,
    *,
    backend: str = "auto",
) -> Tensor:
    """What R rows of a tree read from a recurrent state that each of them reaches by its own path.

    With S the state at the boundary before the one that row i last passed, G the sum of logarithms of decays from there
    to a token, and a ≺ i the tokens and rows on its path since:

        uᵢ = βᵢ (vᵢ − e^Gᵢ Sᵀkᵢ − Σ_{a≺i} e^(Gᵢ−Gₐ) (kᵢ·kₐ) uₐ)      the gated delta rule; uᵢ = vᵢ without β
        oᵢ = e^Gᵢ Sᵀqᵢ + Σ_{a⪯i} e^(Gᵢ−Gₐ) (qᵢ·kₐ) uₐ

    (arXiv 2412.06464, unrolled). Sums run over the path in the order of the text, so the bits of a row depend neither
    on other rows nor on which tokens of its path are committed. Rows are written behind the committed tokens.

    Args:
        query, key: float32 [B, R, G, K].
        value: float32 [B, R, H, V].
        decay: float32 [B, R, H, D], logarithms, at most 0.
        beta: float32 [B, R, H], or ``None``.
        parents: int32 [B, T], T ≥ R, a smaller row, or −1 for the text; the last R are the rows of this call, those
            before them were given to earlier ones.
        depths: int32 [B, T], rows before it on its path, at most ``window.block``.
        lengths: int32 [B], tokens that are committed.
        window: with room for the rows; see :meth:`StateWindow.reserve`.

    Returns:
        float32 [B, R, H, V]

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    batch, rows, groups, size = key.shape
    heads, width, decays = value.shape[2], value.shape[3], decay.shape[3]
    device = key.device
    check_tensor("key", key, (None, None, None, None), FLOAT, device)
    check_tensor("query", query, (batch, rows, groups, size), FLOAT, device)
    check_tensor("value", value, (batch, rows, None, None), FLOAT, device)
    check_tensor("decay", decay, (batch, rows, heads, None), FLOAT, device)
    if beta is not None:
        check_tensor("beta", beta, (batch, rows, heads), FLOAT, device)
    check_tensor("parents", parents, (batch, None), INT, device)
    count = parents.shape[1]
    if count < rows:
        raise ValueError(f"parents: of {count} rows, where {rows} are given")
    check_tensor("depths", depths, (batch, count), INT, device)
    check_window(window, lengths, (batch, heads, groups, size, width, decays))
    if window.keys.shape[1] < window.places + count:
        raise ValueError(f"window: no room for {count} rows; call window.reserve({count}) first")
    return resolve(backend, device, ROWS)(query, key, value, decay, beta, parents, depths, lengths, window)


def state_commit(
    accepted_rows: Tensor, num_accepted: Tensor, lengths: Tensor, window: StateWindow, *, backend: str = "auto"
) -> None:
    """Append accepted rows of the last :func:`state_rows` to the text, and fold every block that is full into a state.

    ``lengths`` is left as it is: layers share it.

    Args:
        accepted_rows: int32 [B, P], a path from its first row on.
        num_accepted: int32 [B], how many of them; 0 leaves a text as it is.
        lengths: int32 [B], tokens that were committed before.
        window: in which the rows are.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    batch, device = lengths.shape[0], lengths.device
    check_tensor("accepted_rows", accepted_rows, (batch, None), INT, device)
    check_tensor("num_accepted", num_accepted, (batch,), INT, device)
    _, _, heads, size, width = window.state.shape
    check_window(window, lengths, (batch, heads, window.keys.shape[2], size, width, window.sums.shape[3]))
    resolve(backend, device, COMMIT)(accepted_rows, num_accepted, lengths, window)


def check_window(window: StateWindow, lengths: Tensor, sizes: tuple[int, ...]) -> None:
    """Raise unless a window has these sizes: batch, heads, groups, key, value, decays."""
    batch, heads, groups, size, width, decays = sizes
    device = lengths.device
    check_tensor("lengths", lengths, (batch,), INT, device)
    if groups < 1 or heads % groups or decays not in (1, size):
        raise ValueError(f"value, key, decay: {heads} heads, {groups} groups and {decays} decays do not go together")
    check_tensor("window.state", window.state, (2, batch, heads, size, width), FLOAT, device)
    places = window.keys.shape[1]
    check_tensor("window.keys", window.keys, (batch, places, groups, size), FLOAT, device)
    check_tensor("window.updates", window.updates, (batch, places, heads, width), FLOAT, device)
    check_tensor("window.sums", window.sums, (batch, places, heads, decays), FLOAT, device)
    if window.block < 1 or places < window.places:
        raise ValueError(f"window: {places} places hold no {window.places} tokens")
