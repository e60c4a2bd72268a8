#!/usr/bin/env bash
# What no card can run, cards that are too small, and cards that fail: one line that says so, an exit status that is
# not 0, and the last checkpoint as it was. EMU_CARD and EMU_FAIL (dev/emulator) play the cards.
trainer=build/train_emulated
if [ ! -x $trainer ]; then
  echo "skip cards that refuse and cards that fail: no $trainer"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A shard of 1,024 tokens, all zero: magic number, version, count; then a tiny model.
{ printf '\x88\xd8\x34\x01\1\0\0\0\0\4\0\0'; head -c $((1012 + 2048)) /dev/zero; } > "$folder/shard.bin"
data="--train=$folder/shard.bin --out=$folder/run --sample-tokens=0 --quiet"
model="--vocab=257 --layers=1 --heads=1 --ffn=16 --context=8"
passed=0 failed=0

check() {  # check WHAT TEXT COMMAND...: COMMAND's last line on stderr is the only one, an error that holds TEXT
  local what=$1 text=$2 errors status before
  shift 2
  before=$(cksum "$folder"/run/*.safetensors)
  errors=$("$@" 2>&1 >/dev/null)
  status=$?
  if [[ $status -ne 0 && $status -ne 86 && $errors == "error: "*"$text"* && $errors != *$'\n'* &&
        $before == "$(cksum "$folder"/run/*.safetensors)" ]]; then
    echo "ok   $what"
    passed=$((passed + 1))
  else
    printf 'FAIL %s: exit status %d, expected one line with "%s", and the checkpoints as before:\n%s\n' \
      "$what" $status "$text" "$errors"
    failed=$((failed + 1))
  fi
}
$trainer $data $model --width=16 --batch=2 --total-batch=16 --steps=2 >/dev/null
check "a batch beyond the grid" "--batch 65536: on the GPU at most 65535" \
  $trainer $data $model --width=16 --batch=65536 --total-batch=524288 --steps=3
check "a width beyond the registers" "--width 1032: on the GPU a multiple of 8, at most 1024" \
  $trainer $data $model --width=1032 --batch=2 --total-batch=16 --steps=3
check "a head size that the tiles do not fit" "--heads 1: head size 24; on the GPU a multiple of 16, at most 128" \
  $trainer $data $model --width=24 --batch=2 --total-batch=16 --steps=3
check "more sources than lanes" "--block-size 2: 33 sources before the head; on the GPU at most 32" \
  $trainer $data ${model/layers=1/layers=32} --width=16 --block-size=2 --batch=2 --total-batch=16 --steps=3

resumed() {  # resumed WHAT TEXT NAME=VALUE: the run goes on, on the card that NAME=VALUE asks for
  check "$1" "$2" env "$3" $trainer $data --resume="$folder/run" --steps=4
}
resumed "a card before 8.0" "compute capability 7.5 with" EMU_CARD=7.5:232448
resumed "a card with less shared memory" "65536 bytes of shared memory a block; needed are 8.0 and 101376" \
  EMU_CARD=9.0:65536
resumed "a program without code for the card" "no code for it; build with make train_rdattnres GPU_ARCH=86" \
  EMU_FAIL=cudaFuncGetAttributes:1:209
resumed "a card that another program has" "no GPU: CUDA-capable device(s) is/are busy" EMU_FAIL=cudaStreamCreate:1:46
for failure in "214 uncorrectable ECC error encountered" "999 unknown error"; do
  resumed "a card lost on the way: ${failure#* }" "${failure#* }; the card failed, the last checkpoint is whole" \
    EMU_FAIL=cudaEventSynchronize:2:"${failure%% *}"
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
