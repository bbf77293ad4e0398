"""An export pushed to a hub on localhost, loaded from it by transformers, and what a hub may refuse."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, dynamic_module_utils

import depthlm
from depthlm.__main__ import main
from depthlm.errors import UserError
from depthlm.hugging_face import export

from ..fake_hub import FakeHub, fake_hub
from ..fake_uploads import Uploads

TOKEN = "hf_of_a_test"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process uses, logged in as `me`."""
    (tmp_path / "uploads").mkdir()
    with fake_hub({}) as url:
        url.uploads = Uploads(url, tmp_path / "uploads", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", str(url))
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Xet, the storage of the real hub, is another server
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield url


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_pushed_model_loads_from_the_hub_with_equal_logits(hub, make_run, tmp_path, monkeypatch, capsys):
    run = make_run("model=moda")
    command = ["depthlm", "export", f"run={run}", "push_to=me/moda-micro", "private=true", "license=mit"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    output = capsys.readouterr().out
    assert output.endswith(f"pushed: {hub}/me/moda-micro\n")
    assert "AutoModelForCausalLM.from_pretrained('me/moda-micro', trust_remote_code=True)" in output
    assert hub.uploads is not None
    assert hub.uploads.private == {"me/moda-micro"}
    assert hub.uploads.messages == [f"Upload an export of depthlm {depthlm.__version__}"]
    assert hub.uploads.content("me/moda-micro") == contents(run / "export")

    loaded = AutoModelForCausalLM.from_pretrained("me/moda-micro", trust_remote_code=True, cache_dir=tmp_path / "cache")
    tokens = torch.arange(28).reshape(2, 14)
    with torch.no_grad():
        difference = loaded(tokens).logits - depthlm.load(run)[0](tokens)
    assert difference.abs().max() <= 1e-5
    assert type(loaded).__module__.startswith("transformers_modules.me.moda")


def test_the_same_command_pushes_again_and_removes_only_the_code_of_another_mechanism(
    hub, make_run, tmp_path, monkeypatch
):
    assert hub.uploads is not None
    # the way of uploading that large files take to the real hub, here without large files
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.uploads.large = (".none",)
    export(make_run("model=mhc", name="mhc"), tmp_path / "to", push_to="me/model")
    folder = hub.commit("me/model", "main")[1]
    assert folder is not None
    (folder / "notes.txt").write_text("written on the hub")
    export(make_run(name="vanilla"), tmp_path / "to", push_to="me/model")
    expected = contents(tmp_path / "to") | {"notes.txt": b"written on the hub"}
    assert hub.uploads.content("me/model") == expected
    assert "modeling_depthlm.py" not in expected


REFUSED = {
    "token": (401, "/repos/create", "the hub refuses the token .HTTP status 401.*; run `hf auth login`, or set HF_"),
    "full": (413, "/commit/main", "the hub refuses the request .HTTP status 413, as the test wants"),
    "strange page": (200, "/repos/create", "what the hub answered is not as expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_a_user_error_that_keeps_the_export(hub, make_run, case):
    status, path, message = REFUSED[case]
    assert hub.uploads is not None
    hub.uploads.fails[path] = status
    run = make_run()
    with pytest.raises(UserError, match=message) as refused:
        export(run, push_to="me/model")
    again = f"The export is in {run}/export; repeat the command, or run hf upload me/model {run}/export"
    assert str(refused.value).endswith(again)
    assert not hub.uploads.fails
    assert "model.safetensors" in contents(run / "export")
    export(run, push_to="me/model")
    assert hub.uploads.content("me/model") == contents(run / "export")


def test_mistakes_are_reported_before_anything_is_written(hub, make_run, monkeypatch):
    run = make_run()
    for name in ("model", "a/b/c", "me/model.git"):
        with pytest.raises(UserError, match=rf"push_to={name}: must be <owner>/<name>, .*, as in push_to=me/"):
            export(run, push_to=name)
    with pytest.raises(UserError, match=r"license=MIT: must be an identifier of the hub.*; did you mean `mit`\?"):
        export(run, license="MIT")
    with pytest.raises(UserError, match="private=: has an effect only with push_to=; give push_to="):
        export(run, private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="there is no token of the Hub; run `hf auth login`, or set HF_TOKEN"):
        export(run, push_to="me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can be pushed; unset it"):
        export(run, push_to="me/model")
    assert not (run / "export").exists()
    assert hub.requests == []


def test_a_public_repository_does_not_get_what_should_be_private(hub, make_run):
    assert hub.uploads is not None
    run = make_run()
    export(run, push_to="me/model")
    before = hub.uploads.content("me/model")
    with pytest.raises(UserError, match=r"the repository exists and is public; change .*, or leave out private="):
        export(run, push_to="me/model", private=True, license="mit")
    assert hub.uploads.content("me/model") == before
