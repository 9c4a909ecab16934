"""Named model sizes; plain numbers, so that reading a configuration needs no torch."""

from __future__ import annotations

PRESETS: dict[str, dict[str, int]] = {
    # vocabulary of 256 bytes, untied head: 0.41M, 1.07M and 3.93M parameters
    "decoder-0.4m": {"dim": 96, "layers": 3, "heads": 4, "kv_heads": 4, "ffn": 288},
    "decoder-1m": {"dim": 144, "layers": 4, "heads": 6, "kv_heads": 6, "ffn": 384},
    "decoder-4m": {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 8, "ffn": 896},
}
"""Shapes by preset name: `dim`, `layers`, `heads`, `kv_heads`, `ffn`."""
