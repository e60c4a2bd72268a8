#!/usr/bin/env bash
# fineweb_edu.sh - downloads FineWeb-Edu as GPT-2 tokens: N training shards of 100M tokens, one for validation.
#
#   data/fineweb_edu.sh 20            2.0B training tokens, 4.2 GB, into data/fineweb_edu
#   data/fineweb_edu.sh 20 /big/disk  into another folder
#
# Several files come at a time (PARALLEL=4). A broken download goes on where it stopped: run the same command
# again. A file gets its final name only when it is complete: right magic, right version, and exactly the tokens
# that its header counts. Files already there are checked and kept.
#
# FINEWEB_EDU_URL names another place with the same files, a mirror or a folder (file:///...).
set -u
URL=${FINEWEB_EDU_URL:-https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main}
PARALLEL=${PARALLEL:-4}
RETRIES=${RETRIES:-5}

fail() { echo "error: $*" >&2; exit 1; }
usage() {
  echo "usage: data/fineweb_edu.sh N [folder]   N: training shards, 0 to 999, 100M tokens each" >&2
  exit 2
}

# The first three 32-bit numbers of a file and its size must fit together. Prints what is wrong, if anything;
# a line that starts with "incomplete" if more bytes could mend it.
problem() {
  local size magic version tokens
  size=$(($(wc -c <"$1")))
  [ "$size" -ge 1024 ] || { echo "incomplete: $size bytes, too short for a header of 1024"; return; }
  read -r magic version tokens < <(od -An -v -t d4 -N 12 "$1")
  local whole=$((1024 + 2 * tokens))
  if [ "$magic" != 20240520 ]; then echo "not a token shard: magic $magic, expected 20240520"
  elif [ "$version" != 1 ]; then echo "shard version $version, expected 1"
  elif [ "$tokens" -lt 0 ] || [ "$size" -gt $whole ]; then
    echo "$size bytes, expected $whole for the $tokens tokens its header counts"
  elif [ "$size" -lt $whole ]; then echo "incomplete: $size bytes of $whole"
  fi
}

# Downloads one file, or finds it complete. Its unfinished form has the name FILE.part.
fetch() {
  local file=$1 path=$FOLDER/$1 part=$FOLDER/$1.part wrong code message attempt
  if [ -e "$path" ]; then
    wrong=$(problem "$path")
    [ -z "$wrong" ] && { echo "$file: already there"; return 0; }
    echo "error: $path: $wrong; remove it and run this again" >&2
    return 1
  fi
  for ((attempt = 1; ; attempt++)); do
    # What an earlier run left may be whole (it ended before the rename), a beginning, or not a shard at all.
    if [ -e "$part" ]; then
      wrong=$(problem "$part")
      [ -z "$wrong" ] && break
      [[ $wrong == incomplete* ]] || rm -f "$part"
    fi
    message=$(curl --fail --silent --show-error --location --connect-timeout 30 --speed-time 60 \
                   --speed-limit 1000 -C - -o "$part" "$URL/$file" 2>&1)
    code=$?
    wrong=""
    [ $code -eq 0 ] && wrong=$(problem "$part")
    [ $code -eq 0 ] && [ -z "$wrong" ] && break
    [ $code -eq 33 ] && rm -f "$part"  # the server cannot go on from the middle
    # 22: the server says no (404 and the like), 23: cannot write, 37: no such local file: asking again
    # does not help.
    if [ $attempt -ge "$RETRIES" ] || [ $code -eq 22 ] || [ $code -eq 23 ] || [ $code -eq 37 ]; then
      echo "error: $file: ${wrong:-${message:-curl ended with status $code}}" >&2
      return 1
    fi
    sleep $((attempt * 2 - 2))
  done
  mv "$part" "$path" || return 1
  echo "$file: $((($(wc -c <"$path") - 1024) / 2)) tokens"
}

if [ "${1:-}" = --fetch ]; then  # this script calls itself, once a file
  fetch "$2"
  exit
fi

[[ "${1:-}" =~ ^[0-9]{1,3}$ ]] && [ $# -le 2 ] || usage
[[ "$PARALLEL" =~ ^[1-9][0-9]*$ ]] || fail "PARALLEL: got '$PARALLEL', expected a number of downloads at a time"
command -v curl >/dev/null || fail "curl: not found; it does the downloading"
export URL RETRIES FOLDER=${2:-$(dirname "$0")/fineweb_edu} FINEWEB_EDU_URL=$URL
mkdir -p "$FOLDER" || exit 1
# Two runs would mix in one .part. The lock (where there is flock) ends with the last process that holds it.
if command -v flock >/dev/null; then
  exec 9>"$FOLDER/.lock" && flock -n -E 99 9
  [ $? -ne 99 ] || fail "$FOLDER: in use by another run of this script"
fi

# Validation first: it is useful with any number of training shards.
shards() {
  echo edu_fineweb_val_000000.bin
  for ((i = 1; i <= 10#$1; i++)); do printf 'edu_fineweb_train_%06d.bin\n' "$i"; done
}
shards "$1" | xargs -P "$PARALLEL" -n 1 bash "$0" --fetch
if [ "${PIPESTATUS[1]}" -ne 0 ]; then fail "some files are missing; run the same command again to go on"; fi
echo "done: --train '$FOLDER/edu_fineweb_train_*.bin' --val '$FOLDER/edu_fineweb_val_*.bin'"
