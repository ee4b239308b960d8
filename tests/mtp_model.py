"""A hybrid checkpoint with a multi-token prediction head, and what vLLM needs to run it on a CPU.

Run as a script, with a folder: give the checkpoint in it a head.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}


def add_head(folder: Path) -> None:
    """Give a Qwen3.5 checkpoint in one file a head of one random layer of full attention."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    path = folder / "model.safetensors"
    weights = load_file(str(path))
    like = f"model.layers.{config['layer_types'].index('full_attention')}."
    size, head = config["hidden_size"], {}
    torch.manual_seed(11)
    for name, weight in weights.items():
        if name.startswith(like):
            # Norms stay as they are; what multiplies is the head's own.
            own = weight.clone() if weight.ndim < 2 else torch.randn_like(weight) * size**-0.5
            head[f"mtp.layers.0.{name.removeprefix(like)}"] = own
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        head[f"mtp.{name}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    head["mtp.fc.weight"] = (torch.randn(size, 2 * size) * size**-0.5).to(torch.bfloat16)
    save_file({**weights, **head}, str(path), metadata={"format": "pt"})


def deepest(length: int, unit: int) -> int:
    """Where a prompt's deepest checkpoint lies: vLLM drops one unit for the head's sake."""
    return max(length // unit * unit - unit, 0)


# vLLM 0.32 has two kernels for this in Triton alone, which does not run on a CPU.


def _move_state(context: Any, row: int, source: int, target: int, accepted: int) -> None:
    """Move every layer's state between two columns of a request's block table.

    Of `accepted` tokens too many, a convolution's window is moved on by as many; a recurrent state
    lies in a column of its own for each of them.
    """
    from vllm.v1.worker.mamba_utils import is_conv_state_dim_first

    def integer(name: str, at: int) -> int:
        return int(getattr(context, name)[at])

    for state in range(context.num_states):
        table = integer("block_table_ptrs", integer("state_group_indices", state))
        table += 4 * row * int(context.block_table_stride_req)
        base, stride = integer("state_base_addrs", state), integer("state_block_strides", state)
        width = integer("state_conv_widths", state)
        size, inner = integer("state_elem_sizes", state), integer("state_inner_sizes", state)

        def page(column: int, table: int = table, base: int = base, stride: int = stride) -> int:
            return base + ctypes.c_int32.from_address(table + 4 * column).value * stride

        if not width:
            ctypes.memmove(page(target), page(source + accepted), inner * size)
        elif not is_conv_state_dim_first():
            moved, tokens = accepted * inner * size, width - accepted
            ctypes.memmove(page(target), page(source) + moved, tokens * inner * size)
        else:
            for one in range(integer("state_dim_row_count", state)):
                at = one * integer("state_dim_row_stride", state)
                ctypes.memmove(
                    page(target) + at, page(source) + at + accepted * size,
                    (width - accepted) * size,
                )  # fmt: skip


def _before_forward(
    context: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any,
    idx_mapping: Any,
) -> None:  # fmt: skip
    """Carry the states of requests whose next tokens begin in another block there."""
    if not context.is_initialized:
        return
    assert idx_mapping is None
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source not in {-1, target}:
            _move_state(context, row, source, target, int(token_bias_gpu[row]))


def _after_forward(
    context: Any, num_reqs: int, num_accepted_tokens_gpu: Any, mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any, num_computed_tokens_gpu: Any, num_draft_tokens_gpu: Any,
) -> None:  # fmt: skip
    """Keep the state at the end of a block that accepted tokens have gone beyond."""
    if num_reqs == 0 or not context.is_initialized:
        return
    context.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    for row in range(num_reqs):
        certain = int(num_computed_tokens_gpu[row] + num_scheduled_tokens_gpu[row])
        certain -= int(num_draft_tokens_gpu[row])
        blocks = (certain + int(num_accepted_tokens_gpu[row]) - 1) // context.block_size
        beyond, source = blocks * context.block_size - certain, int(mamba_state_idx_gpu[row])
        if beyond < 0:
            continue
        if source == blocks - 1:
            context.num_accepted_tokens_out[row] = 1
            if not beyond:
                continue
        _move_state(context, row, source, blocks - 1, beyond)


def run_on_cpu() -> None:
    """Have this process's vLLM run hybrids with a head on a CPU."""
    import torch
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    from vllm import _custom_ops

    MambaSpecDecodeGPUContext.run_fused_precopy = _before_forward
    MambaSpecDecodeGPUContext.run_fused_postprocess = _after_forward
    # The compiled kernels want rows without gaps, which vLLM gives them on processors with AMX.
    packed = {"q", "k", "v", "a", "b", "initial_state_indices", "spec_state_indices"}
    for kind in ("", "_spec"):
        name = f"fused_sigmoid_gating_delta_rule_update{kind}_cpu"
        kernel = getattr(_custom_ops, name)

        def call(kernel: Any = kernel, **given: Any) -> Any:
            for tensor in packed & given.keys():
                given[tensor] = given[tensor].clone(memory_format=torch.contiguous_format)
            return kernel(**given)

        setattr(_custom_ops, name, call)


if __name__ == "__main__":
    add_head(Path(sys.argv[1]))
