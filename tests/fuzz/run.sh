#!/usr/bin/env bash
# usage: run.sh SECONDS build/fuzz_TARGET...   runs libFuzzer on each target for so long, starting from its
# seeds and from what earlier runs kept. Ends with a line a target, exit status 1 if one has found something.
seconds=$1
shift
if ! command -v clang++ >/dev/null; then
  echo "error: make fuzz needs clang++ with libFuzzer (Debian: apt-get install clang). Without it, make test"
  echo "runs the same targets, and FUZZ_RUNS=1000000 build/test_fuzz_asan runs them for longer"
  exit 1
fi
build/test_fuzz_asan --seeds build/fuzz || exit 1
found=0 summary=
for program in "$@"; do
  target=${program#build/fuzz_} log=$program.log
  # Two further limits: no single allocation over 16 MiB, no input that takes ten seconds.
  if ! "$program" -max_total_time="$seconds" -max_len=8192 -malloc_limit_mb=16 -rss_limit_mb=1024 -timeout=10 \
      -print_final_stats=1 -artifact_prefix="build/fuzz/found_$target-" "build/fuzz/$target" >"$log" 2>&1; then
    tail -n 40 "$log"
    found=1
  fi
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  edges=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1)
  kept=$(ls "build/fuzz/$target" | wc -l) findings=$(ls build/fuzz | grep -c "^found_$target-")
  summary+=$(printf '%-12s %9s executions, %s edges, %s inputs kept, %s findings' "$target" "$runs" \
    "${edges#cov: }" "$kept" "$findings")$'\n'
done
printf '%s' "$summary"
exit $found
