#!/usr/bin/env bash
# Runs the test programs and scripts given as arguments, one after the other, prints what they print and the
# seconds each took, adds up their totals and ends with one line:  N passed, N failed, N skipped
#
# A program must itself end with such a line. One that crashes, or ends without totals, counts as one more
# failure, so that nothing is lost when a test dies half-way. *.py runs under python3 (skipped with its reason
# where there is none), *.sh under bash.
# Exit status 0 only if nothing failed.
set -u
passed=0 failed=0 skipped=0
[ $# -gt 0 ] || { echo "usage: tests/run.sh program..." >&2; exit 2; }
output=$(mktemp) || exit 1
trap 'rm -f "$output"' EXIT

for program in "$@"; do
  echo "== $program"
  case $program in
    *.py) command=(python3 "$program")
          if ! command -v python3 >/dev/null; then
            echo "skip $program: no python3 on this machine"
            skipped=$((skipped + 1))
            continue
          fi ;;
    *.sh) command=(bash "$program") ;;
    */*)  command=("$program") ;;
    *)    command=("./$program") ;;
  esac
  start=$SECONDS
  "${command[@]}" 2>&1 | tee "$output"
  status=${PIPESTATUS[0]}
  if [[ $(tail -n 1 "$output") =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
    skipped=$((skipped + BASH_REMATCH[3]))
    # Totals and exit status must tell the same story.
    if [ "$status" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then
      echo "FAIL $program: exit status $status, though it counted no failure"
      failed=$((failed + 1))
    elif [ "$status" -eq 0 ] && [ "${BASH_REMATCH[2]}" -ne 0 ]; then
      echo "note: $program failed, yet its exit status is 0"
    fi
  else
    echo "FAIL $program: ended without totals (exit status $status)"
    # Cases it reported before it died still count.
    passed=$((passed + $(grep -c '^ok ' "$output")))
    failed=$((failed + $(grep -c '^FAIL ' "$output") + 1))
    skipped=$((skipped + $(grep -c '^skip ' "$output")))
  fi
  echo "   $((SECONDS - start)) s"
  echo
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
