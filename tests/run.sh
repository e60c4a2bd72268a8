#!/usr/bin/env bash
# Runs the test programs and scripts given as arguments, one per core side by side, prints in their order what
# they print and the seconds each took, adds up their totals and ends with: N passed, N failed, N skipped
#
# A program must itself end with such a line. One that crashes, or ends without totals, counts as one more
# failure, so that nothing is lost when a test dies half-way. *.py runs under python3 (skipped with its reason
# where there is none), *.sh under bash.
# Exit status 0 only if nothing failed.
set -u
[ $# -gt 0 ] || { echo "usage: tests/run.sh program..." >&2; exit 2; }
passed=0 failed=0 skipped=0
folder=$(mktemp -d) || exit 1
trap 'kill $all 2>/dev/null; rm -rf "$folder"' EXIT

# run_one NUMBER PROGRAM: leaves NUMBER.output and then NUMBER.end with its exit status and seconds.
cat > "$folder/run_one" << 'SCRIPT'
case $2 in
  *.py) command=(python3 "$2") ;;
  *.sh) command=(bash "$2") ;;
  */*)  command=("$2") ;;
  *)    command=("./$2") ;;
esac
output=$(dirname "$0")/$1
"${command[@]}" > "$output.output" 2>&1 < /dev/null
echo "$? $SECONDS" > "$output.ending"
mv "$output.ending" "$output.end"
SCRIPT
number=0
for program in "$@"; do printf '%d\n%s\n' $((number++)) "$program"; done |
  xargs -n 2 -P "$(getconf _NPROCESSORS_ONLN)" bash "$folder/run_one" &
all=$!

number=0
for program in "$@"; do
  echo "== $program"
  output=$folder/$((number++))
  if [[ $program == *.py ]] && ! command -v python3 >/dev/null; then
    echo "skip $program: no python3 on this machine"
    skipped=$((skipped + 1))
    continue
  fi
  while [ ! -e "$output.end" ] && kill -0 $all 2>/dev/null; do sleep 0.1; done
  status=none seconds=0
  [ -e "$output.end" ] && read -r status seconds < "$output.end"
  touch "$output.output"
  cat "$output.output"
  if [[ $(tail -n 1 "$output.output") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
    skipped=$((skipped + BASH_REMATCH[3]))
    # Totals and exit status must tell the same story.
    if [ "$status" != 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then
      echo "FAIL $program: exit status $status, though it counted no failure"
      failed=$((failed + 1))
    elif [ "$status" = 0 ] && [ "${BASH_REMATCH[2]}" -ne 0 ]; then
      echo "note: $program failed, yet its exit status is 0"
    fi
  else
    echo "FAIL $program: ended without totals (exit status $status)"
    # Cases it reported before it died still count.
    passed=$((passed + $(grep -c '^ok ' "$output.output")))
    failed=$((failed + $(grep -c '^FAIL ' "$output.output") + 1))
    skipped=$((skipped + $(grep -c '^skip ' "$output.output")))
  fi
  echo "   $seconds s"
  echo
done
wait $all 2>/dev/null
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
