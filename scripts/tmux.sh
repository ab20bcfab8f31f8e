#!/usr/bin/env bash
# The logs of a run in tmux: follows the files of OUTPUT_DIR, also before they are there. Attaches to the session if it exists.
#
#   scripts/tmux.sh [-s SESSION] [-o OUTPUT_DIR] [-a claude|codex]      defaults: prime-rl, outputs, no agent
#   scripts/tmux.sh [SESSION [OUTPUT_DIR]]
# Windows: RL (a shell, orchestrator, inference), Logs (trainer, orchestrator, environments, inference), SUCCESS, Monitor; with an agent
# Launcher (a shell), Logs, SUCCESS and Agent.
set -euo pipefail

session=prime-rl
output_dir=outputs
agent=

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; }
value() { # OPTION [VALUE]
  [ $# -ge 2 ] && [ -n "$2" ] || { echo "tmux.sh: $1 needs a value" >&2; exit 1; }
  printf '%s' "$2"
}

positional=0
while [ $# -gt 0 ]; do
  case "$1" in
    -s | --session-name) session=$(value "$@") || exit 1; shift 2 ;;
    -o | --output-dir) output_dir=$(value "$@") || exit 1; shift 2 ;;
    -a | --agent) agent=$(value "$@") || exit 1; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "tmux.sh: unknown option $1" >&2; usage >&2; exit 1 ;;
    *)
      case $positional in
        0) session=$1 ;;
        1) output_dir=$1 ;;
        *) echo "tmux.sh: too many arguments" >&2; exit 1 ;;
      esac
      positional=$((positional + 1)); shift ;;
  esac
done
case "$agent" in '' | claude | codex) ;; *) echo "tmux.sh: --agent is claude or codex, not $agent" >&2; exit 1 ;; esac
command -v tmux >/dev/null || { echo "tmux.sh: tmux is not installed" >&2; exit 1; }

attach() {
  # Without a terminal (a script, a test) the session is made and left alone.
  [ -t 0 ] && [ -t 1 ] || exit 0
  if [ -n "${TMUX:-}" ]; then exec tmux switch-client -t "=$session"; else exec tmux attach-session -t "=$session"; fi
}
if tmux has-session -t "=$session" 2>/dev/null; then attach; fi

follow() { printf 'tail -n 200 -F %q 2>/dev/null' "$output_dir/logs/latest/$1.log"; }
pane() { # WINDOW TITLE COMMAND: one more pane below the others
  local id
  id=$(tmux split-window -t "$session:$1" -v -P -F '#{pane_id}' "$3")
  tmux select-pane -t "$id" -T "$2"
  tmux select-layout -t "$session:$1" even-vertical >/dev/null
}

# What workers of environments say has files of its own where they run in processes, which come with the first rollouts; what is said of
# environments is in the orchestrator's.
follow_envs() {
  local logs=$output_dir/logs/latest
  printf '(tail -n 200 -F %q %q 2>/dev/null | grep --line-buffered -i env) & until ls %q/envs/*/*.log >/dev/null 2>&1; do sleep 2; done; tail -n 200 -F %q/envs/*/*.log' \
    "$logs/orchestrator.log" "$logs/rl.log" "$logs" "$logs"
}
four_logs() { # WINDOW: trainer, orchestrator, environments and inference, a pane each
  local first
  first=$(tmux new-window -d -t "$session" -n "$1" -P -F '#{pane_id}' "$(follow trainer)")
  tmux select-pane -t "$first" -T Trainer
  pane "$1" Orchestrator "$(follow orchestrator)"
  pane "$1" Envs "$(follow_envs)"
  pane "$1" Inference "$(follow inference)"
  tmux select-layout -t "$session:$1" tiled >/dev/null
}
success() {
  tmux new-window -d -t "$session" -n SUCCESS "tail -n 200 -F $(printf %q "$output_dir/logs/latest/rl.log") 2>/dev/null | grep --line-buffered SUCCESS"
}
watch() { if command -v "$1" >/dev/null; then echo "$1"; else echo "echo '$1 is not installed'; exec ${SHELL:-sh}"; fi; }

first=$(tmux new-session -d -s "$session" -n "$([ -n "$agent" ] && echo Launcher || echo RL)" -x 200 -y 50 -P -F '#{pane_id}')
tmux set-option -g -t "$session" pane-border-status top >/dev/null
tmux set-option -g -t "$session" pane-border-format ' #{pane_title} ' >/dev/null
if [ -n "$agent" ]; then
  tmux select-pane -t "$first" -T Launcher
  four_logs Logs
  success
  tmux new-window -d -t "$session" -n Agent "$(watch "$agent")"
  tmux select-window -t "$session:Launcher"
else
  tmux select-pane -t "$first" -T Trainer
  pane RL Orchestrator "$(follow orchestrator)"
  pane RL Inference "$(follow inference)"
  four_logs Logs
  success
  tmux new-window -d -t "$session" -n Monitor "$(watch nvtop)"
  pane Monitor htop "$(watch htop)"
  tmux select-window -t "$session:RL"
fi
tmux select-pane -t "$first"
attach
