from pathlib import Path

import yaml

from dppo_megatron.config.loader import load_config
from dppo_megatron.config_origins import read_settings, write_origins

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def test_every_value_has_its_file_and_line_its_override_or_default(tmp_path: Path) -> None:
    loaded = load_config(QUICKSTART, ["grpo.seed=7", "dppo.completion_pruning.policy=neyman"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(loaded.effective))
    write_origins(tmp_path, loaded)
    settings = {one.key: one for one in read_settings(tmp_path)}
    assert (settings["grpo.seed"].value, settings["grpo.seed"].origin) == ("7", "override grpo.seed=7")
    assert settings["dppo.completion_pruning.policy"].origin == "override dppo.completion_pruning.policy=neyman"
    assert settings["dppo.completion_pruning.min_keep_probability"].origin == "default"
    path, _, line = settings["policy.megatron_cfg.optimizer.lr"].origin.rpartition(":")
    assert Path(path) == QUICKSTART
    assert QUICKSTART.read_text().splitlines()[int(line) - 1].split() == ["lr:", "1.0e-3"]


def test_a_run_that_kept_no_origins_shows_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("grpo: {seed: 1}")
    assert [one.origin for one in read_settings(tmp_path)] == [""]
    assert read_settings(tmp_path / "elsewhere") == ()
