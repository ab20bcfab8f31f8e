#!/usr/bin/env bash
# The logs of a run in tmux: follows the files of OUTPUT_DIR, also before they are there. Attaches to the session if it exists.
#
#   scripts/tmux.sh [-s SESSION] [-o OUTPUT_DIR]      defaults: prime-rl, outputs
#   scripts/tmux.sh [SESSION [OUTPUT_DIR]]
set -euo pipefail

session=prime-rl
output_dir=outputs

usage() { sed -n '2,6s/^# \{0,1\}//p' "$0"; }
value() { # OPTION [VALUE]
  [ $# -ge 2 ] && [ -n "$2" ] || { echo "tmux.sh: $1 needs a value" >&2; exit 1; }
  printf '%s' "$2"
}

positional=0
while [ $# -gt 0 ]; do
  case "$1" in
    -s | --session-name) session=$(value "$@") || exit 1; shift 2 ;;
    -o | --output-dir) output_dir=$(value "$@") || exit 1; shift 2 ;;
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
command -v tmux >/dev/null || { echo "tmux.sh: tmux is not installed" >&2; exit 1; }

attach() {
  # Without a terminal (a script, a test) the session is made and left alone.
  [ -t 0 ] && [ -t 1 ] || exit 0
  if [ -n "${TMUX:-}" ]; then exec tmux switch-client -t "=$session"; else exec tmux attach-session -t "=$session"; fi
}
if tmux has-session -t "=$session" 2>/dev/null; then attach; fi

follow() { printf 'tail -n 200 -F %q 2>/dev/null' "$output_dir/logs/$1.log"; }
pane() { # WINDOW TITLE COMMAND: one more pane below the others
  local id
  id=$(tmux split-window -t "$session:$1" -v -P -F '#{pane_id}' "$3")
  tmux select-pane -t "$id" -T "$2"
  tmux select-layout -t "$session:$1" even-vertical >/dev/null
}

first=$(tmux new-session -d -s "$session" -n RL -x 200 -y 50 -P -F '#{pane_id}')
tmux select-pane -t "$first" -T Trainer
tmux set-option -t "$session" pane-border-status top >/dev/null
tmux set-option -t "$session" pane-border-format ' #{pane_title} ' >/dev/null
pane RL Orchestrator "$(follow orchestrator)"
pane RL Inference "$(follow inference)"

tmux new-window -d -t "$session" -n Logs "$(follow rl)"
tmux new-window -d -t "$session" -n SUCCESS "tail -n 200 -F $(printf %q "$output_dir/logs/rl.log") 2>/dev/null | grep --line-buffered SUCCESS"
watch() { if command -v "$1" >/dev/null; then echo "$1"; else echo "echo '$1 is not installed'; exec ${SHELL:-sh}"; fi; }
tmux new-window -d -t "$session" -n Monitor "$(watch nvtop)"
pane Monitor htop "$(watch htop)"

tmux select-window -t "$session:RL"
tmux select-pane -t "$first"
attach
