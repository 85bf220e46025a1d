"""Teach SGLang's ``torch_native`` attention, the one that runs on any CPU, to read the mask of a token tree.

Its backends for GPUs read it themselves. This one is for tests: slow, and plain enough to check by reading.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def register():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    extend = TorchNativeAttnBackend.forward_extend

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not forward_batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            at = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, at, k, v)
        return attend(self, q, layer, forward_batch)

    TorchNativeAttnBackend.forward_extend = forward_extend


def attend(backend, q, layer, forward_batch):
    """Rows of a tree see the text before it and their ancestors in it."""
    tree = forward_batch.spec_info
    rows, mask = tree.draft_token_num, tree.custom_mask
    queries = q.view(-1, rows, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)  # [B, H, R, D]
    mask = mask[: len(queries) * rows * rows].view(len(queries), rows, rows)
    keys, values = (
        get(layer.layer_id)
        for get in (backend.token_to_kv_pool.get_key_buffer, backend.token_to_kv_pool.get_value_buffer)
    )
    out = []
    for i, length in enumerate(forward_batch.seq_lens.tolist()):
        request = forward_batch.req_pool_indices[i]
        slots = backend.req_to_token_pool.req_to_token[request, : length + rows].long()
        seen = torch.cat([torch.ones(rows, length, dtype=torch.bool), mask[i]], 1)
        key, value = (buffer[slots].transpose(0, 1)[None].to(q.dtype) for buffer in (keys, values))
        attended = scaled_dot_product_attention(
            queries[i : i + 1], key, value, attn_mask=seen, scale=layer.scaling, enable_gqa=True
        )
        out.append(attended[0].transpose(0, 1).reshape(rows, -1))
    return torch.cat(out)
