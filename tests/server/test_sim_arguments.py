"""The simulated engine's command line."""

from pathlib import Path

import pytest

from server.sim_arguments import parse_arguments
from server.sim_model import write_sim_model


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "100", "--num-gpu-blocks-override", "2"], "does not fit into the KV cache"),
        (["--block-size", "0"], "block_size is 0"),
        (["--time-scale", "-1"], "scale is -1"),
        (["--tensor-parallel-size", "2"], "unrecognized arguments"),
        (["--max-num", "3"], "unrecognized arguments"),
        (["--kv-events-config", "yes"], "--kv-events-config"),
        (["--kv-events-config", '{"enable_kv_cache_events": true, "port": 5}'], "port"),
        (["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "nats"}'], "'nats'"),
        (["--fault", '{"kind": "refuse", "seconds": 1}'], "only works at run time"),
        (["--fault", '{"kind": "explode"}'], "explode"),
    ],
)
def test_wrong_arguments_end_with_a_usage_error(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and the message names the argument and the reason; unknown vLLM flags are errors too."""
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv, {})
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_the_context_length_comes_from_the_model_unless_it_is_given(tmp_path: Path) -> None:
    """config.json's max_position_embeddings, as in vLLM."""
    write_sim_model(tmp_path)
    assert parse_arguments(["--model", str(tmp_path)], {}).settings.scheduler.max_model_len == 32768
    assert parse_arguments(["--max-model-len", "99"], {}).settings.scheduler.max_model_len == 99


def test_the_time_scale_multiplies_every_duration_and_slow_start_comes_on_top() -> None:
    """Start-up and reload are scaled like steps; a fault's seconds are real ones."""
    argv = ["--time-scale", "0.5", "--startup-seconds", "4", "--weights-load-seconds", "2"]
    settings = parse_arguments([*argv, "--fault", '{"kind": "slow_start", "seconds": 3}'], {}).settings
    assert (settings.startup_s, settings.weights_load_s, settings.timing.scale) == (5.0, 1.0, 0.5)


def test_the_model_is_served_under_the_name_it_was_given_by() -> None:
    """The name is the model's path unless --served-model-name says otherwise; without a model it is `simulated`."""
    assert parse_arguments([], {}).settings.served_model_names == ("simulated",)
    assert parse_arguments(["--model", "dir/x"], {}).settings.served_model_names == ("dir/x",)
    assert parse_arguments(["--served-model-name", "a", "b"], {}).settings.served_model_names == ("a", "b")


def test_embeddings_and_stored_responses_are_off_unless_asked_for() -> None:
    """--runner pooling makes an embedding model; vLLM's environment variable turns the store on."""
    variable = "VLLM_ENABLE_RESPONSES_API_STORE"
    assert [parse_arguments(argv, {}).settings.pools for argv in ([], ["--runner", "pooling"])] == [False, True]
    stores = [parse_arguments([], environ).settings.responses_store for environ in ({}, {variable: "0"}, {variable: "1"})]
    assert stores == [False, False, True]


def test_the_api_key_may_come_from_the_environment() -> None:
    """--api-key wins over VLLM_API_KEY, and an empty key is none."""
    environ = {"VLLM_API_KEY": "env"}
    assert parse_arguments([], environ).settings.api_keys == ("env",)
    assert parse_arguments(["--api-key", "a", "b"], environ).settings.api_keys == ("a", "b")
    assert parse_arguments([], {"VLLM_API_KEY": ""}).settings.api_keys == ()
