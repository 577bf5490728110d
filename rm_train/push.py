"""``rm-train push``: put a checkpoint on a model hub.

Invariant: what is pushed was loaded and verified right before, and others can load it: its base is on a hub too, or the
folder is a whole model.
"""

from pathlib import Path

from rm_core.checkpoint import RECORD_FILE, CheckpointError
from rm_core.model import RewardModel
from rm_core.model_card import CARD_FILE, is_hub_id, model_card
from rm_core.smollm2 import BUNDLED_NAME
from rm_train.rows import first_line


def push(checkpoint: str, repository: str, *, private: bool, branch: str | None, message: str | None) -> str:
    """Upload the folder to ``owner/name``, made where it does not exist, and return the commit's address.

    Raises CheckpointError where the checkpoint does not verify, where its base is a local folder, or the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    directory = Path(checkpoint)
    if not (directory / RECORD_FILE).is_file():
        raise CheckpointError(f"{checkpoint}: is no checkpoint folder (no {RECORD_FILE})")
    model = RewardModel.load(checkpoint, dtype="float32")
    assert model.record is not None, "this is a bug: the record was there a moment ago"
    base = model.record.base_model.name
    if model.kind == "adapter" and base != BUNDLED_NAME and (not is_hub_id(base) or Path(base).is_dir()):
        raise CheckpointError(
            f"{checkpoint}: its base {base} is a folder of this machine; push a whole model made by rm-train merge"
        )
    if not (directory / CARD_FILE).is_file():
        (directory / CARD_FILE).write_text(model_card(model.record), encoding="utf-8")
    api = HfApi(library_name="betterthan")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if branch is not None:
            api.create_branch(repository, branch=branch, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            revision=branch,
            commit_message=message or f"Reward model {model.reward_id[:19]}",
        )
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise CheckpointError(f"{repository}: the hub refused: {first_line(error)}") from error
    return str(commit.commit_url)
