"""Links of a token tree from its ancestor mask."""

import torch


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
