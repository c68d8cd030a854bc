"""The Triton backend, interpreted, does what the torch backend does."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from cbatch_cli.assembly import build_core
from cbatch_cli.attention.backend import choose_attention_backend
from cbatch_cli.attention.metadata import KVScales
from cbatch_cli.attention.triton_backend import TritonAttentionBackend
from cbatch_cli.config import EngineConfig
from cbatch_cli.models.hf_model import HFModel
from cbatch_cli.request import Request, RequestKey, SamplingParams
from tests.attention.paged_cases import PagedCase, make_case
from tests.tiny_models import VOCAB_SIZE, tiny_model

MIXED = [(300, 1), (17, 1), (0, 1), (30, 20), (0, 7)]


def run_triton(
    case: PagedCase, *, deterministic: bool = False, scales: KVScales | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and caches after the step."""
    caches = (case.k_cache.clone(), case.v_cache.clone())
    backend = TritonAttentionBackend(
        [case.layer],
        [caches],
        case.block_size,
        max_num_seqs=8,
        max_model_len=1024,
        deterministic=deterministic,
        kv_scales=None if scales is None else {case.layer.index: scales},
    )
    backend.begin_step([case.metadata])
    output = backend.forward(
        case.layer,
        case.query,
        case.key,
        case.value,
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    return output, *caches


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "lengths", [MIXED, MIXED[:3], MIXED[3:]], ids=["mixed", "decodes", "chunks"]
)
def test_equals_the_torch_backend(lengths: list[tuple[int, int]], deterministic: bool) -> None:
    case = make_case(
        lengths,
        head_dim=16,
        value_head_dim=24,
        window=40,
        softcap=3.0,
        with_sinks=True,
        stored_already=1,
        dtype=torch.float32,
    )
    actual, expected = run_triton(case, deterministic=deterministic), case.run_backend()
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1:], expected[1:], rtol=0, atol=0, equal_nan=True)


def test_long_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(900, 1), (600, 1)], num_kv_heads=1, head_dim=16, dtype=torch.float32)
    expected = case.run_backend()[0]
    torch.testing.assert_close(run_triton(case)[0], expected, rtol=1e-5, atol=1e-5)
    # Workspaces that hold one row of two partial results.
    monkeypatch.setattr("cbatch_cli.attention.triton_backend._MAX_WORKSPACE_ELEMENTS", 64)
    output = run_triton(case, deterministic=True)[0]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_in_every_batch_when_deterministic() -> None:
    case = make_case([(700, 1), (40, 1)], num_kv_heads=1, head_dim=16, dtype=torch.float32)
    together = run_triton(case, deterministic=True)[0]
    metadata = case.metadata
    alone = dataclasses.replace(
        case,
        query=case.query[1:],
        key=case.key[1:],
        value=case.value[1:],
        metadata=dataclasses.replace(
            metadata,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=metadata.seq_lens[1:],
            block_tables=metadata.block_tables[1:],
            slot_mapping=metadata.slot_mapping[1:],
            num_decodes=1,
            max_seq_len=41,
            query_lens_cpu=(1,),
            seq_lens_cpu=(41,),
        ),
    )
    assert torch.equal(run_triton(alone, deterministic=True)[0], together[1:])


def test_tokens_of_no_sequence_come_out_as_zeros() -> None:
    case = make_case([(20, 1), (0, 5)], head_dim=16, dtype=torch.float32)
    padded = dataclasses.replace(
        case,
        query=torch.cat([case.query, torch.full_like(case.query[:3], math.nan)]),
        key=torch.cat([case.key, torch.full_like(case.key[:3], math.nan)]),
        value=torch.cat([case.value, torch.full_like(case.value[:3], math.nan)]),
        metadata=dataclasses.replace(
            case.metadata,
            slot_mapping=torch.cat([case.metadata.slot_mapping, torch.full((3,), -1)]),
        ),
    )
    output = run_triton(padded)[0]
    assert not output[6:].any()
    torch.testing.assert_close(output[:6], case.run_backend()[0], rtol=1e-5, atol=1e-5)


def test_fp8_cache_with_scales_per_layer() -> None:
    case = make_case([(50, 1), (0, 20)], head_dim=16, dtype=torch.float32)
    scales = KVScales(k=0.25, v=0.0625)
    quantised = dataclasses.replace(
        case,
        k_cache=(case.k_cache / scales.k).to(torch.float8_e4m3fn),
        v_cache=(case.v_cache / scales.v).to(torch.float8_e4m3fn),
    )
    output = run_triton(quantised, scales=scales)[0]
    expected = case.run_backend()[0]
    assert float((output - expected).norm() / expected.norm()) < 0.05
    assert float((run_triton(quantised)[0] - expected).norm() / expected.norm()) > 0.5


def test_what_the_kernels_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="key has dtype float64"):
        run_triton(make_case([(3, 1)]))
    with pytest.raises(ValueError, match="D is 264"):
        run_triton(make_case([(3, 1)], head_dim=264, dtype=torch.float32))
    case = make_case([(3, 1)], dtype=torch.float32)
    with pytest.raises(ValueError, match="blocks of 16, not of 32"):
        run_triton(dataclasses.replace(case, block_size=32))


def test_choice_under_the_interpreter() -> None:
    assert choose_attention_backend("triton", torch.device("cpu"), torch.float32) == "triton"
    assert choose_attention_backend("auto", torch.device("cpu"), torch.float16) == "torch"


def generate(name: str, *, config: EngineConfig) -> dict[int, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            key=RequestKey(row),
            prompt_token_ids=tuple(
                torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
            ),
            params=SamplingParams(max_tokens=5, ignore_eos=True),
        )
        for row, length in enumerate((1, 19, 40))
    ]
    model = HFModel(
        tiny_model(name), max_model_len=128, eos_token_ids=frozenset(), generation_defaults={}
    )
    core, _ = build_core(model, config)
    outputs = {output.key.row: output for output in core.generate(requests)}
    assert all(output.error is None for output in outputs.values())
    return {row: tuple(output.token_ids) for row, output in outputs.items()}


@pytest.mark.parametrize("name", ["llama", "gemma2_softcap", "gpt_oss_sinks"])
def test_the_engine_makes_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        device="cpu", block_size=16, num_kv_blocks=24, max_num_seqs=3, max_num_batched_tokens=24
    )
    expected = generate(name, config=config)
    built: list[TritonAttentionBackend] = []

    def build(
        layers: object, caches: object, block_size: int, **_: object
    ) -> TritonAttentionBackend:
        built.append(
            TritonAttentionBackend(
                layers,  # type: ignore[arg-type]
                caches,  # type: ignore[arg-type]
                block_size,
                max_num_seqs=3,
                max_model_len=128,
            )
        )
        return built[-1]

    monkeypatch.setattr("cbatch_cli.attention.torch_backend.TorchAttentionBackend", build)
    assert generate(name, config=config) == expected
    assert len(built) == 1
