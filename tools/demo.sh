#!/usr/bin/env bash
# The main job in small: a Qwen3-type model with random weights learns to reverse words, first from imperfect demonstrations (SFT),
# then from rewards (RL). Ends with one line "demo: eval reward base=… sft=… rl=… probe_diff=… mismatch_kl=… seconds=…".
#   tools/demo.sh PRL      environment: SEED (default 42), DEMO_DIR (default outputs/demo), DEMO_STARTED (Unix time the clock starts at)
set -euo pipefail
prl=$(realpath "${1:?usage: tools/demo.sh PATH_TO_PRL}")
cd "$(dirname "$0")/.."
seed=${SEED:-42}
out=${DEMO_DIR:-outputs/demo}
started=${DEMO_STARTED:-$(date +%s)}
env=(--env.id reverse-text --env.args '{"mode": "tiny", "min_chars": 4, "max_chars": 8, "num_train": 16000, "num_eval": 256, "system_prompt": null, "demonstration_noise": 0.35}')

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
stop() { echo "demo: stopped; what was made so far is in $out" >&2; exit 130; }
trap stop INT TERM
[ ! -e "$out" ] || [ -e "$out/.demo" ] || { echo "demo: $out exists and was not made by the demo; set DEMO_DIR to another folder" >&2; exit 1; }
rm -rf "$out"
mkdir -p "$out"
touch "$out/.demo"

# reward MODEL NAME: mean reward on the held-out tasks, in $out/eval/NAME
reward() {
  "$prl" eval @ configs/demo/eval.toml --model.name "$1" --output-dir "$out/eval/$2" --seed "$seed" >&2
  sed -E 's/.*"avg_reward": ?([-+0-9.eE]+).*/\1/' "$out/eval/$2"/evals/*/*/metadata.json
}

say "1/5 a model with random weights, and 16,000 imperfect demonstrations"
"$prl" init-model --output-dir "$out/base" --family qwen3 --vocab-size 320 --hidden-size 128 --intermediate-size 384 --num-layers 2 \
  --num-heads 4 --head-dim 32 --num-kv-heads 2 --initializer-range 0.06 --seed "$seed"
"$prl" make-data --output "$out/sft.jsonl" "${env[@]}"

say "2/5 SFT: warm-up on the demonstrations"
"$prl" sft @ configs/demo/sft.toml --model.name "$out/base" --data.name "$out/sft.jsonl" --output-dir "$out/sft" --seed "$seed" \
  --log.step-interval 2

say "3/5 RL: trainer, sampler and environment in one process"
"$prl" rl @ configs/demo/rl.toml --model.name "$out/sft/weights/step_240" --output-dir "$out/rl" --seed "$seed" --log.step-interval 2

say "4/5 evaluation on 256 held-out words"
base=$(reward "$out/base" base)
sft=$(reward "$out/sft/weights/step_240" sft)
rl=$(reward "$out/rl/weights/step_120" rl)
proof=$(grep -oE 'probe_diff=[^ ]+ mismatch_kl=[^ ]+' "$out/rl/logs/latest/rl.log" | tail -n 1)

say "5/5 result"
printf '  %-28s %12s\n' model 'mean reward'
printf '  %-28s %12.4f\n' 'random weights' "$base" 'after SFT' "$sft" 'after RL' "$rl"
echo
echo "  models     $out/base, $out/sft/weights/step_240, $out/rl/weights/step_120 (Hugging Face folders)"
echo "  metrics    $out/sft/metrics.jsonl, $out/rl/metrics.jsonl"
echo "  rollouts   $out/rl/rollouts/step_N/train_rollouts.jsonl; answers of the evaluation in $out/eval"
echo "  logs       $out/rl/logs/latest"
echo "  try        $prl inference --model.name $out/rl/weights/step_120"
! grep -qs '^PRL_QUICK:BOOL=ON$' "$(dirname "$prl")/../CMakeCache.txt" || \
  echo "  for work   make build: this program was built for a first look, and only what computes is optimised"
echo
printf 'demo: eval reward base=%.4f sft=%.4f rl=%.4f %s seconds=%d\n' "$base" "$sft" "$rl" "$proof" $(( $(date +%s) - started ))
