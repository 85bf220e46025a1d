"""The operators of SGLang's compiled CPU package that a text model and a token tree need, written in PyTorch.

Only what the end-to-end test calls does anything; names that SGLang imports and never calls here raise.
"""

import ctypes
import sys

import torch


def spans(out, begin, end, rows, table):
    """Concatenate ``table[rows[i], begin[i]:end[i]]`` into the front of ``out``."""
    at = 0
    for row, first, last in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True):
        out[at : at + last - first] = table[row, first:last].to(out.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(rows, table, begin, end, out, width):
    spans(out, begin, end, rows, table)


def assign_req_to_token_pool_cpu(rows, table, begin, end, slots, width):
    at = 0
    for row, first, last in zip(rows.tolist(), begin.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[at : at + last - first].to(table.dtype)
        at += last - first


def fill_accept_out_cache_loc_cpu(accept_index, slots, out):
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    out[: len(kept)] = slots[kept]


def copy_all_layer_kv_cache_cpu(pointers, strides, target, source, *rest):
    """Copy the slots ``source`` of every buffer, given by address, to ``target``, reading all before writing."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(pointer + slot * stride, stride) for slot in source.tolist()]
        for slot, content in zip(target.tolist(), read, strict=True):
            ctypes.memmove(pointer + slot * stride, content, stride)


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow, from the root, the child that holds the target's most likely token."""
    child, sibling, token = retrive_next_token.tolist(), retrive_next_sibling.tolist(), candidates.tolist()
    picked = target_predict.tolist()
    for b, row in enumerate(retrive_index.tolist()):
        node, accepted = 0, 0
        while True:
            accept_index[b, accepted] = row[node]
            predicts[row[node]] = picked[b][node]
            following = child[b][node]
            while following >= 0 and token[b][following] != picked[b][node]:
                following = sibling[b][following]
            if following < 0 or accepted + 1 == accept_index.shape[1]:
                break
            node, accepted = following, accepted + 1
        accept_token_num[b] = accepted


def unused(*args, **kwargs):
    raise NotImplementedError("not needed by the end-to-end test of gsd_kernels_sglang")


assign_draft_cache_locs_contiguous_cpu = build_tree_kernel_efficient_cpu = unused
fill_bonus_tokens_cpu = rotate_input_ids_cpu = unused


def reconstruct_indices_from_tree_mask(tree_mask, lengths, positions, index, next_token, next_sibling, batch, num_rows):
    mask = tree_mask.view(batch, num_rows, num_rows)
    above = mask & torch.ones_like(mask[0]).tril(-1)  # [B, R, R]; row j is a proper ancestor of row i
    order = torch.arange(num_rows)
    depth = above.sum(-1)
    positions.copy_((depth + lengths[:, None]).flatten())
    index.copy_(order + num_rows * torch.arange(batch)[:, None])
    parent = torch.where(depth > 0, (above * order).amax(-1), -1)
    for b in range(batch):
        parents = parent[b].tolist()
        for row in range(num_rows):
            children = [i for i in range(row + 1, num_rows) if parents[i] == row]
            siblings = [i for i in range(row + 1, num_rows) if parents[i] == parents[row] >= 0]
            next_token[b, row] = children[0] if children else -1
            next_sibling[b, row] = siblings[0] if siblings else -1


sys.modules["sgl_kernel.speculative"] = sys.modules[__name__]
