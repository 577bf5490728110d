// How each trainer calls this server, as docs/integrations.md says it (a test compares). RM and sha256:… are filled in.

export const TRAINERS = [
  { name: "TRL", code: `from rm_client import trl_reward_function

reward = trl_reward_function("RM", reward_id="sha256:…", eos_token_ids=[tokenizer.eos_token_id])
trainer = GRPOTrainer(model=..., reward_funcs=reward, train_dataset=..., args=...)` },
  { name: "OpenRLHF", code: `--reward.remote_url RM/get_reward?reward_id=sha256:…` },
  { name: "OpenRLHF, with a key", code: `from rm_client import OpenRLHFReward

reward_func = OpenRLHFReward("RM", api_key="…", reward_id="sha256:…")` },
  { name: "verl", code: `reward.custom_reward_function.path=pkg://rm_client.adapters
reward.custom_reward_function.name=verl_compute_score
+reward.custom_reward_function.reward_kwargs.url=RM
+reward.custom_reward_function.reward_kwargs.reward_id=sha256:…` },
  { name: "slime, miles", code: `--rm-type remote_rm --rm-url RM/reward` },
  { name: "ms-swift", code: `import functools

from rm_client import MsSwiftReward
from swift.rewards import orms  # ms-swift 3: from swift.plugin import orms

orms["betterthan"] = functools.partial(MsSwiftReward, "RM", reward_id="sha256:…")` },
  { name: "LLaMA-Factory", code: `stage: ppo
reward_model_type: api
reward_model: RM/v1/score/evaluation` },
  { name: "vLLM's clients", code: `curl RM/classify -d '{"input": ["text", "text"], "use_activation": false}'` },
  { name: "SGLang's clients", code: `curl RM/classify -d '{"text": ["text"]}'` },
];

// Where a server asks for a key, and the trainer can send one, the call has a place for it.
const withKey = (code) => (code.includes("api_key") ? code : code
  .replace('reward_id="', 'api_key="…", reward_id="')
  .replace(/^(.*\.)url=.*$/m, "$&\n$1api_key=…")
  .replace("curl ", "curl -H 'Authorization: Bearer …' "));

export const fillIn = (code, address, rewardId, needsKey) =>
  (needsKey ? withKey(code) : code).replaceAll("RM", address).replaceAll("sha256:…", rewardId);
