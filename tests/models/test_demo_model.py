"""The packaged model, as the first command of the README loads it."""

from __future__ import annotations

import pytest

from cbatch_cli.models.loading import load_model, resolve_model

pytestmark = pytest.mark.model


def test_it_loads_in_float32_with_the_windows_of_gemma() -> None:
    files = resolve_model("gemma-3-270m")
    assert files.commit is not None and files.commit.startswith("sha256:a5fd3b62230aa5ec")
    model = load_model(files, device="cpu")
    assert str(model.dtype) == "torch.float32"
    assert (model.vocab_size, model.max_model_len) == (262144, 32768)
    assert model.eos_token_ids == {1}
    windows = [spec.sliding_window for spec in model.layer_specs]
    assert windows == ([512] * 5 + [None]) * 3
    (shape,) = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in model.layer_specs}
    assert shape == (4, 1, 256)
