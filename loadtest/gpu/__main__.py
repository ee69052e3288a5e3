"""Measures the named parts (default: all), prints the figures, writes JSON with the device and versions."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

# Apart: fp8_weights, fp8_exact, int4_products, int4_weights, int4_kinds, int4_exact, int4_experts_mlp,
# int4_experts, long_prompts, long_prompts_fp8.
# Parts of several GPUs, each in a process of its own: tp2, tp4, tp8, pp2, pp4, moe2, halves2, experts2, …4,
# formats2, steps2
ALL_PARTS = (
    "limits,exact,kernels,draw,chunks,products,deterministic,fp8,decode,mixed,prefill,profile,restore,"
    "structured"
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=__doc__)
    parser.add_argument("--parts", default=ALL_PARTS)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {"device": _device()}
    for name in ("limits", *(part for part in asked.parts.split(",") if part != "limits")):
        began_s = time.monotonic()
        try:
            found[name] = _measure(name, asked.step_tokens, found)
        except (RuntimeError, ValueError, AssertionError) as error:  # what fails does not end the rest
            found[name] = f"{type(error).__name__}: {error}"
            print(name, found[name], flush=True)
        print(f"{name}: {time.monotonic() - began_s:.1f} s", flush=True)
        torch.cuda.empty_cache()  # the next engine sizes its cache from what is free
        if asked.out:
            kept = {key: value for key, value in found.items() if not key.startswith("_")}
            asked.out.write_text(json.dumps(kept, indent=1) + "\n")
    os._exit(0)  # libraries of several GPUs may wait for each other at the end, and for ever


def _measure(name: str, step_tokens: int, found: dict[str, Any]) -> Any:
    from loadtest.gpu import (
        chunks,
        deterministic,
        draw,
        engine,
        exact,
        fp8,
        fp8_weights,
        int4_experts,
        int4_weights,
        kernels,
        limits,
        long_prompts,
        pp,
        products,
        profile,
        rank_formats,
        restore,
        rig,
        spread,
        structured,
        tp,
    )

    if name == "limits":
        return limits.limits()
    if name == "exact":
        return exact.exact()
    if name == "kernels":
        return kernels.kernels(found["limits"])
    if name == "chunks":
        return chunks.chunks()
    without_engines: dict[str, Callable[[], Any]] = {
        "fp8_exact": fp8_weights.fp8_exact, "int4_exact": int4_weights.int4_exact,
        "int4_products": int4_weights.int4_products, "int4_experts_mlp": int4_experts.int4_experts_mlp,
        "draw": draw.draw, "products": products.products,
    }  # fmt: skip
    if name in without_engines:
        return without_engines[name]()
    if name in ("formats2", "steps2"):
        return rank_formats.part(name, found["limits"], step_tokens)
    if name.startswith("tp"):
        return tp.tp(int(name.removeprefix("tp")), found["limits"], step_tokens)
    if name.startswith("pp"):
        return pp.pp(int(name.removeprefix("pp")), step_tokens)
    if name.startswith("moe"):
        return spread.moe(int(name.removeprefix("moe")))
    if name.startswith("halves"):
        return spread.halves(int(name.removeprefix("halves")), step_tokens)
    if name.startswith("experts"):
        return spread.experts(int(name.removeprefix("experts")), step_tokens)
    parts = {
        "deterministic": deterministic.deterministic, "fp8": fp8.fp8, "fp8_weights": fp8_weights.fp8_weights,
        "int4_weights": int4_weights.int4_weights,
        "int4_kinds": int4_weights.int4_kinds, "int4_experts": int4_experts.int4_experts,
        "long_prompts": long_prompts.long_prompts,
        "long_prompts_fp8": functools.partial(long_prompts.long_prompts, kv_dtype="fp8"),
    }  # fmt: skip
    if name in parts:  # engines of their own: no room for another
        deterministic.end(found.pop("_built", None))
        return parts[name](found["limits"], step_tokens)
    if "_built" not in found:
        found["_built"] = built = rig.llama_8b(step_tokens)
        found["start"] = {"load_s": built.load_s, "warm_up_s": built.warm_up_s}
        print("start", found["start"], flush=True)
    built = found["_built"]
    if name == "decode":
        return engine.decode(built, found["limits"])
    if name == "mixed":
        return engine.mixed(built)
    if name == "prefill":
        return engine.prefill(built, step_tokens)
    if name == "profile":
        return profile.profiles(built)
    if name == "structured":
        return structured.structured(built.own)
    if name == "restore":
        return restore.restore(built)
    raise ValueError(f"there is no part {name!r}")


def _device() -> dict[str, str]:
    return {
        "name": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }


main()
